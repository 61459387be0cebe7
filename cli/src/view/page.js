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
  // A rectangle in whole pixels of the device, not narrower than one, so that nothing vanishes.
  const add = (left, top, right, bottom, colour) => {
    const place = amount => Math.round(amount * scale) / scale, x = place(left), y = place(top);
    pen.fillStyle = colour;
    pen.fillRect(x, y, Math.max(place(right) - x, 1 / scale), Math.max(place(bottom) - y, 1 / scale));
  };
  // A text on the ground of the page, unless it would lie on another one or leave the picture.
  const own = labels[id] = [];
  const label = (text, left, base) => {
    const wide = pen.measureText(text).width, box = [left - 2, base - 12, left + wide + 2, base + 4];
    const free = other => box[0] >= other[2] || box[2] <= other[0] || box[1] >= other[3] || box[3] <= other[1];
    if (box[0] < 0 || box[1] < 0 || box[2] > width || box[3] > height || !own.every(free)) return;
    own.push([...box, text]);
    pen.globalAlpha = 0.8;
    pen.fillStyle = ink('--ground');
    pen.fillRect(box[0], box[1], box[2] - box[0], box[3] - box[1]);
    pen.globalAlpha = 1;
    pen.fillStyle = ink('--ink');
    pen.fillText(text, left, base);
  };
  return { pen, width, height, add, label, ink: ink('--ink'), rest: ink('--rest') };
}

// A round distance between ticks: the next power of two, or 1, 2 or 5 times a power of ten.
function distance(least, binary) {
  if (binary) return 2 ** Math.ceil(Math.log2(Math.max(1, least)));
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return power * [1, 2, 5, 10].find(factor => power * factor >= least);
}

// Ticks of both axes: amounts at the left, and rows, with their times where they are known, at the bottom.
function axes(page, top, y) {
  const { pen, width, height } = page, [from, to] = visible(), span = state.to - state.from;
  const amounts = [];
  if (state.scale === 'log') for (let amount = 1024; amount < top; amount *= 1024) amounts.push(amount);
  else for (let step = distance(top / 6, true), amount = step; amount < top; amount += step) amounts.push(amount);
  pen.fillStyle = page.ink;
  for (const amount of amounts) pen.fillRect(0, y(amount), 6, 1);
  for (const amount of amounts) page.label(bytes(amount), 10, y(amount) + 4);
  const step = distance(span / Math.max(1, width / 180), false);
  for (let row = Math.ceil((from + 1) / step) * step; row <= to; row += step) {
    const x = (row - 0.5 - state.from) / span * width, time = timeOf(row - 1);
    pen.fillStyle = page.ink;
    pen.fillRect(x, height - 6, 1, 6);
    page.label('row ' + row + (time === undefined ? '' : ', ' + duration(time)), x + 4, height - 5);
  }
}

function cursor(page) {
  const x = (state.row + 0.5 - state.from) / (state.to - state.from) * page.width;
  page.pen.fillStyle = page.ink;
  page.pen.fillRect(x, 0, 1, page.height);
}

// How high an amount stands, 1 being the top.
function share(amount, top) {
  return state.scale === 'log' ? Math.log2(1 + amount) / Math.log2(1 + top) : amount / top;
}

// The rows that a pointer is choosing.
function chosen(page) {
  if (!state.range) return;
  const [left, right] = state.range.map(row => (row - state.from) / (state.to - state.from) * page.width);
  page.pen.globalAlpha = 0.2;
  page.pen.fillStyle = page.ink;
  page.pen.fillRect(Math.min(left, right), 0, Math.abs(right - left), page.height);
  page.pen.globalAlpha = 1;
}

function drawCurves() {
  const page = begin('curves'), { pen, width, height } = page, [from, to] = visible();
  drawn.curves = 1;
  if (!rows) return;
  const limit = meta.limit === null ? meta.recorded.limit : meta.limit;
  let top = limit || 0;
  const high = Math.max(...Object.keys(CURVES).map(name => extent(name, from, to)[1]));
  top = Math.max(high, top < 2 * high ? top : 0, 1) * 1.05;
  const y = amount => height - share(amount, top) * height, span = state.to - state.from;
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
  if (limit && limit < top) {
    pen.fillStyle = page.ink;
    pen.fillRect(0, y(limit), width, 1);
    const text = 'limit ' + bytes(limit);
    page.label(text, width - pen.measureText(text).width - 6, y(limit) + 15);
    drawn.curves++;
  }
  drawn.failed = 0;
  pen.fillStyle = '#d55e00';
  for (const [row] of meta.failed) {
    if (row < from || row >= to) continue;
    pen.fillRect((row + 0.5 - state.from) / span * width - 1, 0, 2, height);
    drawn.failed++;
  }
  axes(page, top, y);
  cursor(page);
  chosen(page);
}

// In each column of pixels the largest blocks of its fullest row, one on the other, and the rest as one: together
// they are as high as what was requested there.
function stacks(width) {
  const [from, to] = visible(), most = 17, length = to - from;
  const count = Math.max(1, Math.min(Math.floor(width / 10), length));
  const made = [];
  for (let n = 0; n < count; n++) {
    const first = from + Math.floor(length * n / count), last = from + Math.floor(length * (n + 1) / count);
    const row = peakRow(first, last);
    made.push({ first, last, row, total: curves.requested[row], blocks: [], rest: curves.requested[row] });
  }
  const { order, born, freed } = bySize, tops = Int32Array.from(made, column => column.row);
  let open = count;
  for (let at = 0; at < order.length && open; at++) {
    if (freed[at] <= from || born[at] >= to) continue;
    // The first column whose row is not before the block: that of its row, or the next.
    let n = born[at] <= from ? 0 : Math.max(0, Math.floor((born[at] - from) * count / length) - 1);
    while (n < count && tops[n] < born[at]) n++;
    for (; n < count && tops[n] < freed[at]; n++) {
      const column = made[n];
      if (column.blocks.length === most) continue;
      column.blocks.push(order[at]);
      column.rest -= data.asked[order[at]];
      if (column.blocks.length === most || column.rest === 0) open--;
    }
  }
  return made;
}

// Addresses without the gaps between what blocks ever stood in.
let places;
function compact() {
  const order = ranked(data.address).reverse();
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
  const page = begin('bands'), { width, height } = page, [from, to] = visible();
  const span = state.to - state.from, x = row => (row - state.from) / span * width;
  drawn.bands = 0;
  hits = [];
  if (!rows) return;
  const box = (left, top, right, bottom, colour, block) => {
    page.add(left, top, right, bottom, colour);
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
        box(left, top, right, Math.max(at - (at - top > 3 ? 1 : 0), top), colour, block);
        at = top;
      };
      if (column.rest) add(column.rest, page.rest);
      for (const block of column.blocks.slice().reverse()) add(data.asked[block], blockColour(block, page.rest), block);
    }
    words = 'Each column is the fullest of its rows; grey is what smaller blocks have together.';
  } else {
    places = places || compact();
    const most = Math.floor(1.8 * width), { order, born, freed } = byArea;
    let shown = 0, left = 0;
    for (let at = 0; at < order.length; at++) {
      if (freed[at] <= from || born[at] >= to) continue;
      if (shown >= most) { left++; continue; }
      const block = order[at], bottom = height - places.y[block] / places.height * height;
      box(Math.max(0, x(born[at])), bottom - data.held[block] / places.height * height, Math.min(width, x(freed[at])),
        bottom, blockColour(block, page.rest), block);
      shown++;
    }
    words = shown + ' blocks are shown, ' + left + ' smaller ones of these rows are not.';
  }
  const now = (state.row + 0.5 - state.from) / span * width;
  page.add(now, 0, now + 1, height, page.ink);
  $('drawn').textContent = 'Rows ' + (from + 1) + ' to ' + to + '. ' + words + ' ' + drawn.bands + ' rectangles.';
}

// The live blocks after a row, the largest first, and how many there are.
function largest(row, most) {
  const live = [], { order, born, freed } = bySize;
  let count = 0;
  for (let at = 0; at < order.length; at++) if (born[at] <= row && freed[at] > row && count++ < most) live.push(order[at]);
  return { found: live, count };
}

const line = block => [block, bytes(data.asked[block]), bytes(data.held[block]), streamName(data.stream[block]),
  contextName(data.context[block]), '0x' + data.address[block].toString(16), data.born[block] + 1,
  data.freed[block] < rows ? data.freed[block] + 1 : '-'];
const HEAD = ['block', 'requested', 'allocated', 'stream', 'context', 'address', 'from row', 'to row'];

// Sums of the blocks that count once for one sign and back for the other, by stream and by context.
function sums(sign) {
  const groups = { stream: new Map(), context: new Map() };
  for (let block = 0; block < data.born.length; block++) {
    const of = sign(block);
    if (!of) continue;
    for (const group in groups) {
      const entry = groups[group].get(data[group][block]) || { count: 0, bytes: 0 };
      entry.count += of;
      entry.bytes += of * data.asked[block];
      groups[group].set(data[group][block], entry);
    }
  }
  return groups;
}

function sumTables(where, caption, sign) {
  const groups = sums(sign);
  where.replaceChildren();
  for (const group in groups) {
    if (group === 'context' && !meta.contexts.length) continue;
    const sorted = [...groups[group]].sort((a, b) => Math.abs(b[1].bytes) - Math.abs(a[1].bytes)), most = 30;
    const lines = sorted.slice(0, most).map(([index, of]) => [GROUPS[group](index), of.count, bytes(of.bytes)]);
    const rest = sorted.slice(most);
    if (rest.length) {
      const sum = key => rest.reduce((all, [, of]) => all + of[key], 0);
      lines.push([rest.length + ' others', sum('count'), bytes(sum('bytes'))]);
    }
    table(element('div', undefined, where), caption + ', by ' + group, [group, 'blocks', 'requested'], lines);
  }
}

function fillTables() {
  const row = state.row, { found, count: number } = largest(row, 20);
  const time = timeOf(row);
  $('figures').textContent = rows === 0 ? 'No row was replayed.' : 'After row ' + (row + 1) + (time === undefined ? '' : ', at ' + duration(time)) + ': requested ' +
    bytes(curves.requested[row]) + ', allocated ' + bytes(curves.allocated[row]) + ', reserved ' + bytes(curves.reserved[row]);
  $('live-words').textContent = 'Live after row ' + (row + 1) + ': ' + count(number, 'block') + '.';
  table($('live'), 'The largest', HEAD, found.map(line));
  sumTables($('live-sums'), 'All', block => alive(block, row));
  const [one, two] = [state.marked, row];
  $('difference-words').textContent = 'From row ' + (one + 1) + ', which is marked, to row ' + (two + 1) + ': requested ' +
    bytes((curves.requested[two] || 0) - (curves.requested[one] || 0)) + ', reserved ' +
    bytes((curves.reserved[two] || 0) - (curves.reserved[one] || 0)) + '.';
  sumTables($('difference'), 'What came and went', block => alive(block, two) - alive(block, one));
  const changed = [], { order } = bySize;
  for (let at = 0; at < order.length && changed.length < 20; at++) {
    if (alive(order[at], two) !== alive(order[at], one)) changed.push(order[at]);
  }
  const blocks = element('div', undefined, $('difference'));
  table(blocks, 'The largest blocks of them', ['', ...HEAD],
    changed.map(block => [alive(block, two) ? 'came' : 'went', ...line(block)]));
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
      held = { x: event.offsetX, from: state.from, to: state.to, moved: false, row: event.shiftKey ? rowAt(event) : undefined };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', event => {
      if (held) {
        const by = (held.x - event.offsetX) / canvas.clientWidth * (held.to - held.from);
        held.moved ||= Math.abs(held.x - event.offsetX) > 3;
        if (held.moved && held.row !== undefined) {
          state.range = [held.row, rowAt(event)];
          drawCurves();
        } else if (held.moved) view(held.from + by, held.to + by);
      } else if (canvas.id === 'bands') {
        const { offsetX: x, offsetY: y } = event;
        const hit = hits.find(([left, top, right, bottom]) => x >= left && x < right && y >= top && y < bottom);
        canvas.title = hit ? line(hit[4]).map((cell, n) => HEAD[n] + ' ' + cell).join(', ') : '';
      }
    });
    canvas.addEventListener('pointerup', event => {
      const range = state.range;
      state.range = undefined;
      if (range) view(Math.min(...range), Math.max(...range));
      else if (held && !held.moved) select(Math.floor(rowAt(event)));
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
  $('colour').onchange = event => { state.colour = event.target.value; blockLegend(); draw(); };
  $('find').oninput = event => { look(event.target.value); draw(); };
  $('scale').onchange = event => { state.scale = event.target.value; draw(); };
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
  const again = () => { draw(); drawMap(); drawOutOfMemory(); drawFiles(); };
  window.addEventListener('resize', again);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
}

// Dashes tell curves apart without colour; blocks have the names of their streams and contexts in the tables.
function blockLegend() {
  const name = GROUPS[state.colour], names = state.colour === 'stream' ? meta.streams.length : meta.contexts.length + 1;
  const signs = { requested: ' (line)', allocated: ' (dashes)', reserved: ' (dots)' };
  legend($('legend'), [...Object.entries(CURVES).map(([name, colour]) => [name + signs[name], colour]),
    ...Array.from({ length: Math.min(8, names) }, (_, n) => ['blocks of ' + name(n), PALETTE[n]])]);
}

// What the recording says of the limit and the device of its allocator.
function recordedFacts() {
  const { limit, memory } = meta.recorded;
  return memory === null ? [] : ['recorded with ' + (limit === null ? 'no limit' : 'limit ' + bytes(limit)) + ' on a device of ' + bytes(memory)];
}

// The most that was requested and reserved, what held the most of it, and why the program or the replay failed.
function summary() {
  if (!rows) return 'No row was replayed.';
  const requested = extent('requested', 0, rows)[1], reserved = extent('reserved', 0, rows)[1], peak = peakRow(0, rows);
  const limit = meta.recorded.limit ?? meta.limit, oom = meta.out_of_memory;
  const words = ['Peak ' + bytes(requested) + ' requested, ' + bytes(reserved) + ' reserved',
    ...(requested ? ['ratio ' + (reserved / requested).toFixed(3)] : []), 'limit ' + (limit === null ? 'none' : bytes(limit))];
  const most = [...sums(block => alive(block, peak)).context].sort((a, b) => b[1].bytes - a[1].bytes)[0];
  return words.join(', ') + '.' + (meta.contexts.length && most ? ' Most of it at the peak: ' + contextName(most[0]) +
    ', ' + bytes(most[1].bytes) + '.' : '') + (!oom ? '' : ' Out of memory at row ' + (oom.recorded ? oom.row + 1 : rows) +
    (oom.cause === null ? '' : ', cause: ' + oom.cause) + '.');
}

async function main() {
  document.title = meta.name + ' – cualloc view';
  $('name').textContent = meta.name;
  data = await columns();
  prepare();
  $('summary').textContent = summary();
  $('facts').textContent = [count(rows, 'row'), count(data.born.length, 'block'), count(meta.streams.length, 'stream'), meta.policy + ' policy',
    'limit ' + (meta.limit === null ? 'none' : bytes(meta.limit)), bytes(meta.memory) + ' of device memory',
    ...recordedFacts(), ...(meta.config === null ? [] : ['CUALLOC_CONFIG=' + meta.config]), ...meta.warnings].join(', ');
  // The section on memory says what such an error does.
  if (meta.error !== null && !meta.out_of_memory) {
    $('error').hidden = false;
    $('error').textContent = meta.error;
  }
  $('colour').disabled = !meta.contexts.length;
  $('colour').value = state.colour;
  blockLegend();
  state.wanted = meta.out_of_memory ? meta.out_of_memory.requested : bySize.order.length ? data.asked[bySize.order[0]] : 0;
  state.to = Math.max(rows, 1);
  $('wanted').value = bytes(state.wanted);
  $('row').max = rows;
  $('instant').max = Math.max(0, maps.length - 1);
  listen();
  drawOutOfMemory();
  showFiles();
  if (meta.stacks) {
    $('stacks').hidden = false;
    $('stacks-at').textContent = meta.stacks_at ?? '(nothing was allocated)';
    table($('stacks-table'), 'Estimates, the most bytes first', ['stack', 'live blocks', 'live bytes', 'bytes asked for in all'],
      meta.stacks.map(([name, blocks, live, all]) => [name, blocks, bytes(live), bytes(all)]));
  }
  const failed = meta.out_of_memory && meta.out_of_memory.recorded ? meta.out_of_memory.row : -1;
  select(meta.error !== null ? rows - 1 : failed >= 0 && failed < rows ? failed : rows ? peakRow(0, rows) : 0);
  // What tests and other scripts may ask.
  window.__view = {
    state, drawn, labels, curves, data, maps, extent, stacks, largest, sums, select, view, zoom, reason, contents, look, files, showFiles, draw, share, csv,
  };
}

main().catch(error => {
  $('error').hidden = false;
  $('error').textContent = 'This page cannot be shown: ' + error;
});
