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
const state = { from: 0, to: Math.max(rows, 1), row: 0, marked: 0, mode: 'stacked', map: 0, wanted: 0 };
const drawn = { curves: 0, bands: 0, map: 0 };
const streamName = index => index < meta.streams.length ? 'stream ' + meta.streams[index] : 'another stream';
const streamColour = index => PALETTE[index % PALETTE.length];

function bytes(amount) {
  const sign = amount < 0 ? '−' : '';
  let rest = Math.abs(amount), unit = 0;
  while (rest >= 1024 && unit < 5) { rest /= 1024; unit++; }
  return sign + (unit ? rest.toFixed(2) : rest) + ' ' + ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][unit];
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

function table(where, caption, head, lines) {
  const made = element('table');
  element('caption', caption, made);
  const top = element('tr', undefined, element('thead', undefined, made));
  for (const word of head) element('th', word, top).scope = 'col';
  const body = element('tbody', undefined, made);
  for (const line of lines) {
    const row = element('tr', undefined, body);
    for (const cell of line) element('td', cell, row);
  }
  where.replaceChildren(made);
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

// The columns of the file, by name: differences, the sign in the lowest bit, seven bits a byte.
async function columns() {
  const text = atob($('data').textContent.trim());
  const packed = Uint8Array.from(text, letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const found = {};
  let at = 0;
  for (const [name, count] of meta.columns) {
    const column = new Float64Array(count);
    for (let i = 0, last = 0; i < count; i++) {
      let byte = raw[at++], scale = 64;
      const sign = byte & 1 ? -1 : 1;
      let amount = (byte & 127) >> 1;
      while (byte > 127) {
        byte = raw[at++];
        amount += (byte & 127) * scale;
        scale *= 128;
      }
      column[i] = last += sign * amount;
    }
    found[name] = column;
  }
  $('data').remove();
  return found;
}

let data, curves, byArea, bySize, maps;

// The curves row by row, from the blocks.
function prepare() {
  const count = data.born.length;
  data.freed = data.born.map((row, block) => row + data.life[block]);
  curves = { requested: new Float64Array(rows), allocated: new Float64Array(rows), reserved: new Float64Array(rows) };
  for (let block = 0; block < count; block++) {
    curves.requested[data.born[block]] += data.asked[block];
    curves.allocated[data.born[block]] += data.held[block];
    if (data.freed[block] < rows) {
      curves.requested[data.freed[block]] -= data.asked[block];
      curves.allocated[data.freed[block]] -= data.held[block];
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
  const order = Uint32Array.from({ length: count }, (_, block) => block);
  bySize = order.slice().sort((a, b) => data.asked[b] - data.asked[a] || a - b);
  const area = data.asked.map((asked, block) => asked * data.life[block]);
  byArea = order.sort((a, b) => area[b] - area[a] || a - b);
  maps = [];
  for (let map = 0, segment = 0, piece = 0; map < data['map.row'].length; map++) {
    const made = { row: data['map.row'][map], segments: [], pieces: [] };
    for (const last = segment + data['map.segments'][map]; segment < last; segment++) {
      const kind = data['segment.kind'][segment];
      const of = {
        address: data['segment.address'][segment], size: data['segment.size'][segment],
        small: !!(kind & 1), mapped: !!(kind & 2), view: !!(kind & 4), first: made.pieces.length,
      };
      for (const end = piece + data['segment.blocks'][segment]; piece < end; piece++) {
        made.pieces.push({
          segment: of, address: of.address + data['piece.offset'][piece], size: data['piece.size'][piece],
          asked: data['piece.asked'][piece], state: data['piece.state'][piece],
          stream: data['piece.stream'][piece] - 1, pending: data['piece.pending'][piece] - 1,
        });
      }
      made.segments.push(of);
    }
    maps.push(made);
  }
}

// The least and the most of a curve over rows, from the coarsest bins that lie within them.
function extent(name, from, to, each) {
  const curve = curves[name], least = data[name + '.least'], most = data[name + '.most'];
  let low = Infinity, high = -Infinity;
  for (let row = from; row < to;) {
    let place = 0, count = Math.ceil(rows / 2 ** meta.finest), bin = 2 ** meta.finest, best = -1, length = 0;
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
  let found = from;
  for (let row = from + 1; row < to; row++) if (curves.requested[row] > curves.requested[found]) found = row;
  return found;
}
