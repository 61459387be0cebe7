'use strict';
// Everything from the file is put into the page as text, never as markup.
const $ = id => document.getElementById(id);
const meta = JSON.parse($('meta').textContent);
// The colours of Okabe and Ito, which the colour-blind tell apart.
const PALETTE = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#b8a800', '#7f7f7f'];
const STATES = ['live', 'free', 'pending', 'in a view', 'quarantined', 'busy'];
const STATE_COLOURS = ['#0072b2', '#56b4e9', '#e69f00', '#cc79a7', '#d55e00', '#7f7f7f'];
const CURVES = { requested: '#0072b2', allocated: '#009e73', reserved: '#d55e00' };
const rows = meta.rows;
const state = { from: 0, to: Math.max(rows, 1), row: 0, marked: 0, mode: 'stacked', colour: meta.contexts.length ? 'context' : 'stream', find: '', map: 0, wanted: 0, scale: 'linear' };
const drawn = { curves: 0, bands: 0, map: 0 };
// The texts of each picture, with their boxes.
const labels = {};
const streamName = index => index < meta.streams.length ? 'stream ' + meta.streams[index] : 'another stream';
// Contexts have numbers from 1; 0 is none.
const contextName = index => index === 0 ? 'no context' : meta.contexts[index - 1];
const GROUPS = { stream: streamName, context: contextName };

// The colour of a block: that of its stream or context. What is looked for keeps it, and the rest is grey.
function blockColour(block, grey) {
  if (found && !found(block)) return grey;
  return PALETTE[data[state.colour][block] % PALETTE.length];
}

// What is looked for: a size with a unit, or a part of a context's or stream's name.
let found;
function look(text) {
  state.find = text.trim();
  const wanted = state.find.toLowerCase(), amount = size(state.find);
  const named = Object.fromEntries(Object.entries(GROUPS).map(([group, name]) => {
    const names = group === 'stream' ? meta.streams.length : meta.contexts.length + 1;
    return [group, Uint8Array.from({ length: names }, (_, index) => name(index).toLowerCase().includes(wanted))];
  }));
  found = wanted === '' ? undefined : block => named.context[data.context[block]] || named.stream[data.stream[block]] ||
    data.asked[block] === amount;
}

function bytes(amount) {
  const sign = amount < 0 ? '−' : '';
  let rest = Math.abs(amount), unit = 0;
  while (rest >= 1024 && unit < 5) { rest /= 1024; unit++; }
  return sign + (unit ? rest.toFixed(2) : rest) + ' ' + ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit];
}

const count = (amount, word) => amount + ' ' + word + (amount === 1 ? '' : 's');

// Microseconds since the recording began.
function duration(micros) {
  const [unit, of] = micros < 1000 ? ['µs', 1] : micros < 1e6 ? ['ms', 1e3] : ['s', 1e6];
  return Number((micros / of).toPrecision(4)) + ' ' + unit;
}

// The time of a row, between the two known ones around it; nothing without times.
function timeOf(row) {
  const { times } = meta, after = times.findIndex(([known]) => known >= row);
  if (after < 0) return times.length ? times[times.length - 1][1] : undefined;
  if (after === 0) return times[0][1];
  const [[one, begin], [two, end]] = times.slice(after - 1, after + 1);
  return begin + (end - begin) * (row - one) / (two - one || 1);
}

// Bytes, or a number with a unit, as the command reads them.
function size(text) {
  const found = /^\s*([0-9.]+)\s*([kmgt]?)(ib|b)?\s*$/i.exec(text);
  if (!found) return NaN;
  const base = found[2] && /^b$/i.test(found[3] || '') ? 1000 : 1024;
  return Math.round(Number(found[1]) * base ** ' kmgt'.indexOf(found[2].toLowerCase() || ' '));
}

function element(kind, text, parent) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function legend(where, entries) {
  where.replaceChildren();
  for (const [name, colour] of entries) {
    const entry = element('li', undefined, where);
    const patch = element('canvas', undefined, entry);
    patch.width = patch.height = 1;
    const pen = patch.getContext('2d');
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    entry.append(name);
  }
}

// The columns of the file by name, each number as the difference to the one before it.
async function columns() {
  const text = $('data').textContent.trim();
  const packed = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  const found = await new Response(stream).json();
  for (const name in found) {
    let last = 0;
    found[name] = Float64Array.from(found[name], step => last += step);
  }
  $('data').remove();
  return found;
}

// The finest level of detail has bins of this many rows; finer ones are the rows themselves.
const FINEST = 16;

// Of a curve the least or the most in each bin, for bins of twice the length from level to level, one level behind the
// other up to that of one bin.
function levels(curve, of) {
  const all = [];
  for (let row = 0; row < rows; row += FINEST) all.push(curve.subarray(row, row + FINEST).reduce((one, other) => of(one, other)));
  for (let begin = 0, end = all.length; end - begin > 1; begin = end, end = all.length) {
    for (let bin = begin; bin < end; bin += 2) all.push(bin + 1 < end ? of(all[bin], all[bin + 1]) : all[bin]);
  }
  return all;
}

let data, curves, byArea, bySize, maps;

// Numbers of blocks, that with the largest amount first and of equals the first. Positive numbers with a point lie in
// the order of their bits, which are sorted sixteen at a time.
function ranked(amounts) {
  const count = amounts.length, digits = new Uint16Array(amounts.buffer, amounts.byteOffset, 4 * count);
  let order = new Uint32Array(count), next = new Uint32Array(count);
  for (let n = 0; n < count; n++) order[n] = n;
  for (let digit = 0; digit < 4; digit++) {
    const begin = new Uint32Array(65537);
    for (let n = 0; n < count; n++) begin[65536 - digits[4 * n + digit]]++;
    if (begin[65536 - digits[digit]] === count) continue;
    for (let n = 1; n < 65537; n++) begin[n] += begin[n - 1];
    for (let n = 0; n < count; n++) next[begin[65535 - digits[4 * order[n] + digit]]++] = order[n];
    [order, next] = [next, order];
  }
  return order;
}

// An order of blocks with their rows beside it, so that a walk through it reads memory in its order.
function walked(order) {
  const born = new Int32Array(order.length), freed = new Int32Array(order.length);
  for (let n = 0; n < order.length; n++) {
    born[n] = data.born[order[n]];
    freed[n] = data.freed[order[n]];
  }
  return { order, born, freed };
}

// The curves row by row, from the blocks.
function prepare() {
  const count = data.born.length, area = new Float64Array(count);
  data.freed = new Float64Array(count);
  curves = { requested: new Float64Array(rows), allocated: new Float64Array(rows), reserved: new Float64Array(rows) };
  for (let block = 0; block < count; block++) {
    const freed = data.freed[block] = data.born[block] + data.life[block];
    area[block] = data.asked[block] * data.life[block];
    curves.requested[data.born[block]] += data.asked[block];
    curves.allocated[data.born[block]] += data.held[block];
    if (freed < rows) {
      curves.requested[freed] -= data.asked[block];
      curves.allocated[freed] -= data.held[block];
    }
  }
  let change = 0;
  for (let row = 0; row < rows; row++) {
    if (row) {
      curves.requested[row] += curves.requested[row - 1];
      curves.allocated[row] += curves.allocated[row - 1];
    }
    if (change + 1 < data['reserved.row'].length && data['reserved.row'][change + 1] === row) change++;
    curves.reserved[row] = data.reserved[change];
  }
  for (const name in curves) {
    data[name + '.least'] = levels(curves[name], Math.min);
    data[name + '.most'] = levels(curves[name], Math.max);
  }
  bySize = walked(ranked(data.asked));
  byArea = walked(ranked(area));
  maps = [];
  for (let map = 0, segment = 0, piece = 0; map < data['map.row'].length; map++) {
    const made = { row: data['map.row'][map], firstSegment: segment, firstPiece: piece };
    for (const last = segment + data['map.segments'][map]; segment < last; segment++) piece += data['segment.blocks'][segment];
    maps.push({ ...made, lastSegment: segment });
  }
}

// The segments and pieces of a map.
function contents(map) {
  const segments = [], pieces = [];
  let piece = map.firstPiece;
  for (let segment = map.firstSegment; segment < map.lastSegment; segment++) {
    const kind = data['segment.kind'][segment];
    const of = {
      address: data['segment.address'][segment], size: data['segment.size'][segment],
      small: !!(kind & 1), mapped: !!(kind & 2), view: !!(kind & 4),
    };
    const first = pieces.length;
    for (const end = piece + data['segment.blocks'][segment]; piece < end; piece++) {
      pieces.push({
        segment: of, address: of.address + data['piece.offset'][piece], size: data['piece.size'][piece],
        asked: data['piece.asked'][piece], state: data['piece.state'][piece],
        stream: data['piece.stream'][piece] - 1, pending: data['piece.pending'][piece] - 1, run: 0,
      });
    }
    // Free pieces side by side are as good as one.
    for (let n = first; n < pieces.length;) {
      let end = n + 1, run = pieces[n].size;
      while (pieces[n].state === 1 && end < pieces.length && pieces[end].state === 1) run += pieces[end++].size;
      for (; n < end; n++) pieces[n].run = run;
    }
    segments.push(of);
  }
  return { segments, pieces };
}

// The least and the most of a curve over rows, from the coarsest bins that lie within them.
function extent(name, from, to, each) {
  const curve = curves[name], least = data[name + '.least'], most = data[name + '.most'];
  let low = Infinity, high = -Infinity;
  for (let row = from; row < to;) {
    let place = 0, count = Math.ceil(rows / FINEST), bin = FINEST, best = -1, length = 0;
    while (count && row % bin === 0 && row + bin <= to) {
      best = place + row / bin;
      length = bin;
      if (count === 1) break;
      place += count;
      count = Math.ceil(count / 2);
      bin *= 2;
    }
    if (best < 0) {
      low = Math.min(low, curve[row]);
      high = Math.max(high, curve[row]);
      row++;
    } else {
      low = Math.min(low, least[best]);
      high = Math.max(high, most[best]);
      row += length;
    }
  }
  return [low, high];
}

// The first row with the most requested bytes.
function peakRow(from, to) {
  const curve = curves.requested, high = extent('requested', from, to)[1], length = FINEST;
  const most = data['requested.most'];
  for (let row = from; row < to;) {
    const whole = row % length === 0 && row + length <= to;
    if (whole && most[row / length] < high) row += length;
    else if (curve[row] === high) return row;
    else row++;
  }
  return from;
}
