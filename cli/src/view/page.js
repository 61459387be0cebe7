const visible = () => [Math.floor(state.from), Math.min(rows, Math.max(Math.floor(state.from) + 1, Math.ceil(state.to)))];
const alive = (block, row) => data.born[block] <= row && data.freed[block] > row;

function begin(id) {
  const canvas = $(id), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext('2d');
  pen.scale(scale, scale);
  pen.font = '12px system-ui, sans-serif';
  const style = getComputedStyle(document.documentElement);
  const ink = name => style.getPropertyValue(name).trim();
  return { pen, width, height, ink: ink('--ink'), rest: ink('--rest') };
}

function cursor(page) {
  const x = (state.row + 0.5 - state.from) / (state.to - state.from) * page.width;
  page.pen.fillStyle = page.ink;
  page.pen.fillRect(x, 0, 1, page.height);
}

function drawCurves() {
  const page = begin('curves'), { pen, width, height } = page, [from, to] = visible();
  drawn.curves = 1;
  if (!rows) return;
  let top = meta.limit || 0;
  const high = Math.max(...Object.keys(CURVES).map(name => extent(name, from, to)[1]));
  top = Math.max(high, top < 2 * high ? top : 0, 1) * 1.05;
  const y = amount => height - amount / top * height, span = state.to - state.from;
  for (const [name, colour] of Object.entries(CURVES)) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.setLineDash(name === 'allocated' ? [6, 3] : name === 'requested' ? [] : [2, 2]);
    pen.beginPath();
    const steps = Math.min(Math.floor(width), to - from);
    for (let step = 0; step < steps; step++) {
      const first = from + Math.floor((to - from) * step / steps);
      const last = Math.max(first + 1, from + Math.floor((to - from) * (step + 1) / steps));
      const [low, most] = extent(name, first, last), x = (first - state.from) / span * width;
      pen.lineTo(x, y(low));
      pen.lineTo(x, y(most));
      pen.lineTo((last - state.from) / span * width, y(most));
    }
    pen.stroke();
  }
  pen.setLineDash([]);
  if (meta.limit && meta.limit < top) {
    pen.fillStyle = page.ink;
    pen.fillRect(0, y(meta.limit), width, 1);
    pen.fillText('limit ' + bytes(meta.limit), 4, y(meta.limit) + 14);
    drawn.curves++;
  }
  pen.fillStyle = page.ink;
  pen.fillText(bytes(top / 1.05), 4, 12);
  cursor(page);
}

// In each column of pixels the largest blocks of its fullest row, one on the other, and the rest as one: together
// they are as high as what was requested there.
function stacks(width) {
  const [from, to] = visible(), most = 17;
  const count = Math.max(1, Math.min(Math.floor(width / 10), to - from));
  const made = [];
  for (let n = 0; n < count; n++) {
    const first = from + Math.floor((to - from) * n / count), last = from + Math.floor((to - from) * (n + 1) / count);
    const row = peakRow(first, last);
    made.push({ first, last, row, total: curves.requested[row], blocks: [], rest: curves.requested[row] });
  }
  let open = made.length;
  const firstNot = (test) => {
    let low = 0, high = made.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(made[middle])) low = middle + 1; else high = middle;
    }
    return low;
  };
  for (const block of bySize) {
    if (!open) break;
    if (data.freed[block] <= from || data.born[block] >= to) continue;
    for (let n = firstNot(c => c.row < data.born[block]); n < made.length && made[n].row < data.freed[block]; n++) {
      if (made[n].blocks.length === most) continue;
      made[n].blocks.push(block);
      made[n].rest -= data.asked[block];
      if (made[n].blocks.length === most || made[n].rest === 0) open--;
    }
  }
  return made;
}

// Addresses without the gaps between what blocks ever stood in.
let places;
function compact() {
  const order = Uint32Array.from(data.address.keys()).sort((a, b) => data.address[a] - data.address[b]);
  const spans = [];
  for (const block of order) {
    const begin = data.address[block], end = begin + data.held[block], last = spans[spans.length - 1];
    if (last && begin <= last.end + 2 ** 21) last.end = Math.max(last.end, end);
    else spans.push({ begin, end, at: last ? last.at + last.end - last.begin : 0 });
  }
  const last = spans[spans.length - 1];
  const y = new Float64Array(data.address.length);
  let span = 0;
  for (const block of order) {
    while (data.address[block] > spans[span].end) span++;
    y[block] = spans[span].at + data.address[block] - spans[span].begin;
  }
  return { y, height: last ? last.at + last.end - last.begin : 1 };
}

let hits = [];
function drawBands() {
  const page = begin('bands'), { pen, width, height } = page, [from, to] = visible();
  const span = state.to - state.from, x = row => (row - state.from) / span * width;
  drawn.bands = 0;
  hits = [];
  if (!rows) return;
  const box = (left, top, right, bottom, colour, block) => {
    pen.fillStyle = colour;
    pen.fillRect(left, top, Math.max(right - left, 0.5), Math.max(bottom - top, 0.5));
    drawn.bands++;
    if (block !== undefined) hits.push([left, top, right, bottom, block]);
  };
  let words;
  if (state.mode === 'stacked') {
    const made = stacks(width), high = Math.max(1, ...made.map(column => column.total));
    for (const column of made) {
      const left = x(column.first), right = x(column.last);
      let at = height;
      const add = (amount, colour, block) => {
        const top = at - amount / high * height;
        box(left, top, right, Math.max(at - (at - top > 3 ? 0.5 : 0), top), colour, block);
        at = top;
      };
      if (column.rest) add(column.rest, page.rest);
      for (const block of column.blocks.slice().reverse()) add(data.asked[block], streamColour(data.stream[block]), block);
    }
    words = 'Each column is the fullest of its rows; grey is what smaller blocks have together.';
  } else {
    places = places || compact();
    const most = Math.floor(1.8 * width);
    let shown = 0, left = 0;
    for (const block of byArea) {
      if (data.freed[block] <= from || data.born[block] >= to) continue;
      if (drawn.bands >= most) { left++; continue; }
      const bottom = height - places.y[block] / places.height * height;
      box(Math.max(0, x(data.born[block])), bottom - data.held[block] / places.height * height,
        Math.min(width, x(data.freed[block])), bottom, streamColour(data.stream[block]), block);
      shown++;
    }
    words = shown + ' blocks are shown, ' + left + ' smaller ones of these rows are not.';
  }
  cursor(page);
  $('drawn').textContent = 'Rows ' + (from + 1) + ' to ' + to + '. ' + words + ' ' + drawn.bands + ' rectangles.';
}

// Why a piece cannot serve a request; nothing if it can.
function reason(piece) {
  if (piece.state === 2) return 'pending on ' + (piece.pending < 0 ? 'a stream' : streamName(piece.pending));
  if (piece.state === 3) return 'in a view';
  if (piece.state !== 1) return STATES[piece.state];
  if (piece.size < state.wanted) return 'too small';
  return '';
}

function drawMap() {
  const map = maps[state.map], page = begin('map'), { pen, width, height } = page;
  drawn.map = 0;
  for (const id of ['reasons', 'segments', 'pieces']) $(id).replaceChildren();
  if (!map) return;
  const home = map.segments.filter(segment => !segment.view), lines = 7;
  const total = home.reduce((sum, segment) => sum + segment.size, 0);
  const perPixel = Math.max(1, total) / (width * lines), each = height / lines;
  // Pieces narrower than four pixels are drawn together, in the colour of most of their bytes.
  let at = 0, begun = 0, amounts = new Map();
  const flush = end => {
    let colour = 0;
    for (const [state, amount] of amounts) if (amount > (amounts.get(colour) || 0)) colour = state;
    pen.fillStyle = STATE_COLOURS[colour];
    for (let from = begun / perPixel, to = end / perPixel; from < to - 1e-9;) {
      const line = Math.min(lines - 1, Math.floor(from / width + 1e-9)), stop = Math.min(to, (line + 1) * width);
      const until = stop > from ? stop : to;
      pen.fillRect(from - line * width, line * each + 1, Math.max(until - from - 0.5, 0.5), each - 3);
      drawn.map++;
      from = until;
    }
    begun = end;
    amounts = new Map();
  };
  const free = [], reasons = new Map(), states = new Map();
  for (const piece of map.pieces) {
    if (piece.segment.view) continue;
    at += piece.size;
    amounts.set(piece.state, (amounts.get(piece.state) || 0) + piece.size);
    if ((at - begun) / perPixel >= 4) flush(at);
    states.set(piece.state, (states.get(piece.state) || 0) + piece.size);
    if (piece.state === 0) continue;
    const why = reason(piece) || 'could serve';
    const entry = reasons.get(why) || { bytes: 0, count: 0, largest: 0 };
    entry.bytes += piece.size;
    entry.count++;
    entry.largest = Math.max(entry.largest, piece.size);
    reasons.set(why, entry);
    free.push(piece);
  }
  if (at > begun) flush(at);
  const known = [...states].sort((a, b) => a[0] - b[0]);
  legend($('map-legend'), known.map(([state, amount]) => [STATES[state] + ' ' + bytes(amount), STATE_COLOURS[state]]));
  $('map-words').textContent = 'After row ' + (map.row + 1) + ', map ' + (state.map + 1) + ' of ' + maps.length + ': ' +
    bytes(total) + ' held in ' + home.length + ' segments, each a piece after the other by address. The request that ' +
    'could be served: ' + bytes(state.wanted) + '.';
  table($('reasons'), 'What is not live, by why it cannot serve the request', ['why', 'bytes', 'pieces', 'largest'],
    [...reasons].sort((a, b) => b[1].bytes - a[1].bytes)
      .map(([why, of]) => [why, bytes(of.bytes), of.count, bytes(of.largest)]));
  const kinds = new Map();
  for (const segment of map.segments) {
    const kind = segment.view ? 'view' : (segment.mapped ? 'arena, ' : 'segment, ') + (segment.small ? 'small' : 'large');
    const entry = kinds.get(kind) || { count: 0, bytes: 0 };
    entry.count++;
    entry.bytes += segment.size;
    kinds.set(kind, entry);
  }
  table($('segments'), 'Where memory is mapped; a view shows bytes of arenas again', ['kind', 'runs', 'bytes'],
    [...kinds].map(([kind, of]) => [kind, of.count, bytes(of.bytes)]));
  free.sort((a, b) => b.size - a.size);
  const most = 20;
  table($('pieces'), 'The largest of ' + free.length + ' pieces that are not live', ['address', 'bytes', 'stream', 'why not'],
    free.slice(0, most).map(piece => ['0x' + piece.address.toString(16), bytes(piece.size),
      piece.stream < 0 ? '-' : streamName(piece.stream), reason(piece) || '-']));
}

// The live blocks after a row, the largest first, and how many there are.
function largest(row, most) {
  const found = [];
  let count = 0;
  for (const block of bySize) if (alive(block, row) && count++ < most) found.push(block);
  return { found, count };
}

const line = block => [block, bytes(data.asked[block]), bytes(data.held[block]), streamName(data.stream[block]),
  '0x' + data.address[block].toString(16), data.born[block] + 1, data.freed[block] < rows ? data.freed[block] + 1 : '-'];
const HEAD = ['block', 'requested', 'allocated', 'stream', 'address', 'from row', 'to row'];

function byStream(test) {
  const streams = new Map();
  for (let block = 0; block < data.born.length; block++) {
    const sign = test(block);
    if (!sign) continue;
    const entry = streams.get(data.stream[block]) || { count: 0, bytes: 0 };
    entry.count += sign;
    entry.bytes += sign * data.asked[block];
    streams.set(data.stream[block], entry);
  }
  const sorted = [...streams].sort((a, b) => Math.abs(b[1].bytes) - Math.abs(a[1].bytes)).slice(0, 50);
  return sorted.map(([stream, of]) => [streamName(stream), of.count, bytes(of.bytes)]);
}

function fillTables() {
  const row = state.row, { found, count } = largest(row, 20);
  $('figures').textContent = rows === 0 ? 'No row was replayed.' : 'After row ' + (row + 1) + ': requested ' +
    bytes(curves.requested[row]) + ', allocated ' + bytes(curves.allocated[row]) + ', reserved ' + bytes(curves.reserved[row]);
  $('live-words').textContent = count + ' blocks are live after row ' + (row + 1) + '.';
  table($('live'), 'The largest', HEAD, found.map(line));
  table($('live-streams'), 'By stream', ['stream', 'blocks', 'requested'], byStream(block => alive(block, row)));
  const [one, two] = [state.marked, row];
  $('difference-words').textContent = 'From row ' + (one + 1) + ', which is marked, to row ' + (two + 1) + ': requested ' +
    bytes((curves.requested[two] || 0) - (curves.requested[one] || 0)) + ', reserved ' +
    bytes((curves.reserved[two] || 0) - (curves.reserved[one] || 0)) + '.';
  table($('difference'), 'What came and went, by stream', ['stream', 'blocks', 'requested'],
    byStream(block => alive(block, two) - alive(block, one)));
  const changed = bySize.filter(block => alive(block, two) !== alive(block, one)).slice(0, 20);
  const blocks = element('div', undefined, $('difference'));
  table(blocks, 'The largest blocks of them', ['', ...HEAD],
    [...changed].map(block => [alive(block, two) ? 'came' : 'went', ...line(block)]));
  $('row').value = row + 1;
}

function fillParts() {
  if (!$('parts').open || !rows) return;
  const [from, to] = visible(), count = Math.min(12, to - from), lines = [];
  for (let n = 0; n < count; n++) {
    const first = from + Math.floor((to - from) * n / count), last = from + Math.floor((to - from) * (n + 1) / count);
    const cells = Object.keys(CURVES).flatMap(name => extent(name, first, last).map(bytes));
    lines.push([first + 1, last, ...cells]);
  }
  table($('parts-table'), 'Least and most of each curve', ['from row', 'to row',
    ...Object.keys(CURVES).flatMap(name => [name + ', least', 'most'])], lines);
}

function draw() {
  drawCurves();
  drawBands();
  fillParts();
}

function view(from, to) {
  const least = Math.min(8, Math.max(rows, 1)), most = Math.max(rows, 1);
  const span = Math.min(most, Math.max(least, to - from));
  const middle = (from + to) / 2;
  state.from = Math.min(most - span, Math.max(0, middle - span / 2));
  state.to = state.from + span;
  draw();
}

function zoom(factor, around) {
  view(around - (around - state.from) * factor, around + (state.to - around) * factor);
}

function select(row) {
  state.row = Math.max(0, Math.min(Math.max(rows - 1, 0), Math.round(row)));
  if (state.row < state.from || state.row >= state.to) view(state.row - (state.to - state.from) / 2, state.row + (state.to - state.from) / 2);
  let nearest = 0;
  maps.forEach((map, n) => { if (Math.abs(map.row - state.row) < Math.abs(maps[nearest].row - state.row)) nearest = n; });
  showMap(nearest);
  fillTables();
  draw();
}

function showMap(index) {
  state.map = index;
  $('instant').value = index;
  drawMap();
}

function listen() {
  const rowAt = event => state.from + (state.to - state.from) * event.offsetX / event.target.clientWidth;
  for (const canvas of [$('curves'), $('bands')]) {
    let held;
    canvas.addEventListener('wheel', event => {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, rowAt(event));
    }, { passive: false });
    canvas.addEventListener('pointerdown', event => {
      held = { x: event.offsetX, from: state.from, to: state.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', event => {
      if (held) {
        const by = (held.x - event.offsetX) / canvas.clientWidth * (held.to - held.from);
        held.moved ||= Math.abs(held.x - event.offsetX) > 3;
        if (held.moved) view(held.from + by, held.to + by);
      } else if (canvas.id === 'bands') {
        const { offsetX: x, offsetY: y } = event;
        const hit = hits.find(([left, top, right, bottom]) => x >= left && x < right && y >= top && y < bottom);
        canvas.title = hit ? line(hit[4]).map((cell, n) => HEAD[n] + ' ' + cell).join(', ') : '';
      }
    });
    canvas.addEventListener('pointerup', event => {
      if (held && !held.moved) select(Math.floor(rowAt(event)));
      held = undefined;
    });
    canvas.addEventListener('dblclick', () => view(0, rows));
  }
  const peak = () => { if (rows) select(peakRow(0, rows)); };
  const mark = () => { state.marked = state.row; fillTables(); };
  const keys = {
    '+': () => zoom(0.5, state.row), '=': () => zoom(0.5, state.row), '-': () => zoom(2, state.row), '0': () => view(0, rows),
    p: peak, m: mark, Home: () => select(0), End: () => select(rows - 1),
    ArrowLeft: event => select(state.row - step(event)), ArrowRight: event => select(state.row + step(event)),
  };
  const step = event => event.shiftKey ? 1 : Math.max(1, Math.round((state.to - state.from) / 50));
  document.addEventListener('keydown', event => {
    const busy = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
    if (busy || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key](event);
  });
  $('in').onclick = () => zoom(0.5, state.row);
  $('out').onclick = () => zoom(2, state.row);
  $('all').onclick = () => view(0, rows);
  $('to-peak').onclick = peak;
  $('mark').onclick = mark;
  $('mode').onchange = event => { state.mode = event.target.value; draw(); };
  $('row').onchange = event => select(Number(event.target.value) - 1 || 0);
  $('instant').oninput = event => showMap(Number(event.target.value));
  $('wanted').onchange = event => {
    const wanted = size(event.target.value);
    if (wanted >= 0) state.wanted = wanted;
    event.target.value = bytes(state.wanted);
    drawMap();
  };
  $('parts').ontoggle = fillParts;
  const again = () => { draw(); drawMap(); drawOutOfMemory(); };
  window.addEventListener('resize', again);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
}

async function main() {
  document.title = meta.name + ' – cualloc view';
  $('name').textContent = meta.name;
  data = await columns();
  prepare();
  $('facts').textContent = [rows + ' rows', data.born.length + ' blocks', meta.streams.length + ' streams', meta.policy + ' policy',
    'limit ' + (meta.limit === null ? 'none' : bytes(meta.limit)), bytes(meta.memory) + ' of device memory',
    ...(meta.config === null ? [] : ['CUALLOC_CONFIG=' + meta.config])].join(', ');
  if (meta.error !== null) {
    $('error').hidden = false;
    $('error').textContent = meta.error;
  }
  // Dashes tell curves apart without colour; blocks have the names of their streams in the table.
  legend($('legend'), [...Object.entries(CURVES).map(([name, colour]) => [name + { requested: ' (line)', allocated: ' (dashes)',
    reserved: ' (dots)' }[name], colour]), ...meta.streams.slice(0, 8).map((_, n) => ['blocks of ' + streamName(n), streamColour(n)])]);
  state.wanted = meta.out_of_memory ? meta.out_of_memory.requested : bySize.length ? data.asked[bySize[0]] : 0;
  state.to = Math.max(rows, 1);
  $('wanted').value = bytes(state.wanted);
  $('row').max = rows;
  $('instant').max = Math.max(0, maps.length - 1);
  listen();
  drawOutOfMemory();
  select(meta.error !== null ? rows - 1 : rows ? peakRow(0, rows) : 0);
  // What tests and other scripts may ask.
  window.__view = { state, drawn, curves, data, maps, extent, stacks, largest, select, view, zoom, reason, draw, ready: true };
}

main().catch(error => {
  $('error').hidden = false;
  $('error').textContent = 'This page cannot be shown: ' + error;
});
