// Why a piece cannot serve a request; nothing if it can.
function reason(piece) {
  if (piece.state === 2) return 'pending on ' + (piece.pending < 0 ? 'a stream' : streamName(piece.pending));
  if (piece.state === 3) return 'in a view';
  if (piece.state !== 1) return STATES[piece.state];
  if (piece.run < state.wanted) return 'too small' + (piece.run > piece.size ? ', with its neighbours too' : '');
  return '';
}

function drawMap() {
  const map = maps[state.map], page = begin('map'), { width, height } = page;
  drawn.map = 0;
  for (const id of ['reasons', 'segments', 'pieces']) $(id).replaceChildren();
  if (!map) return;
  const { segments, pieces } = contents(map), home = segments.filter(segment => !segment.view), lines = 7;
  const total = home.reduce((sum, segment) => sum + segment.size, 0);
  const perPixel = Math.max(1, total) / (width * lines), each = height / lines;
  // Pieces narrower than four pixels are drawn together, in the colour of most of their bytes.
  let at = 0, begun = 0, amounts = new Map();
  const flush = end => {
    let colour = 0;
    for (const [state, amount] of amounts) if (amount > (amounts.get(colour) || 0)) colour = state;
    for (let from = begun / perPixel, to = end / perPixel; from < to - 1e-9;) {
      const line = Math.min(lines - 1, Math.floor(from / width + 1e-9)), stop = Math.min(to, (line + 1) * width);
      const until = stop > from ? stop : to;
      const left = from - line * width, right = left + until - from;
      page.add(left, line * each + 1, right - left > 3 ? right - 1 : right, (line + 1) * each - 2, STATE_COLOURS[colour]);
      drawn.map++;
      from = until;
    }
    begun = end;
    amounts = new Map();
  };
  const free = [], reasons = new Map(), states = new Map();
  for (const piece of pieces) {
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
    bytes(total) + ' held in ' + count(home.length, 'segment') + ', each a piece after the other by address. The request that ' +
    'could be served: ' + bytes(state.wanted) + '.';
  table($('reasons'), 'What is not live, by why it cannot serve the request', ['why', 'bytes', 'pieces', 'largest'],
    [...reasons].sort((a, b) => b[1].bytes - a[1].bytes)
      .map(([why, of]) => [why, bytes(of.bytes), of.count, bytes(of.largest)]));
  const kinds = new Map();
  for (const segment of segments) {
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

