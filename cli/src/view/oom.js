// What holds the memory, by its name in an out-of-memory error.
const holderName = of => of.by !== 'size' ? of.by + ' ' + of.name :
  'blocks of ' + bytes(of.least) + ' to ' + bytes(of.below) + ' on stream ' + of.stream;

function drawOutOfMemory() {
  const oom = meta.out_of_memory;
  if (!oom) return;
  $('oom').hidden = false;
  const amount = (name, value) => value === null ? [] : [name + ' ' + bytes(value)];
  const where = oom.recorded ? 'The recorded program ran out of memory at row ' + (oom.row + 1) : 'The replay ran out of memory at row ' + rows;
  $('oom-words').textContent = where + (oom.cause === null ? '' : ' (' + oom.cause + ')') + ': ' +
    [...amount('requested', oom.requested), ...amount('live', oom.live), ...amount('bound', oom.bound).map(text => text + ' (' + oom.bound_of + ')'),
      ...amount('missing', oom.missing)].join(', ') + '. ' + oom.advice;
  const bars = [['requested', oom.requested, '#d55e00'], ...oom.holders.map(of => [holderName(of), of.bytes, '#009e73']),
    ...oom.pending.map(of => ['pending on stream ' + of.stream, of.bytes, '#e69f00']),
    ...oom.holes.map((hole, n) => ['hole ' + (n + 1), hole.bytes, '#56b4e9'])].slice(0, 9);
  $('oom-canvas').style.height = 20 * bars.length + 'px';
  const page = begin('oom-canvas'), high = Math.max(1, ...bars.map(bar => bar[1])), each = page.height / bars.length;
  bars.forEach(([name, amount, colour], n) => {
    page.pen.fillStyle = colour;
    page.pen.fillRect(330, n * each + 2, amount / high * (page.width - 440), each - 4);
    const short = name.length > 46 ? '…' + name.slice(-45) : name;
    page.label(short, 4, n * each + each / 2 + 4);
    page.label(bytes(amount), 336 + amount / high * (page.width - 440), n * each + each / 2 + 4);
  });
  $('oom-table').replaceChildren();
  const more = (id, caption, head, lines) => {
    if (!lines.length) return;
    const place = element('div', undefined, $('oom-table'));
    place.id = id;
    table(place, caption, head, lines);
  };
  more('oom-holders', 'Who held the memory', ['holder', 'bytes', 'blocks'], [
    ...oom.holders.map(of => [holderName(of), bytes(of.bytes), of.blocks]),
    ...(oom.other_live ? [['all others', bytes(oom.other_live), '']] : [])]);
  more('oom-failed', 'Requests that failed in the recorded program', ['row', 'requested', 'live', 'cause', 'context'],
    meta.failed.map(([row, asked, live, cause, context]) => [row + 1, bytes(asked), bytes(live), cause || '-', context || '-']));
  more('oom-pending', 'Freed memory that work may still access', ['stream', 'bytes'], oom.pending.map(of => [of.stream, bytes(of.bytes)]));
  const bound = block => block === null ? 'no large block' : '0x' + block.toString(16);
  more('oom-holes', 'The longest holes, and the large live blocks on both sides', ['address', 'bytes', 'before', 'after'],
    oom.holes.map(hole => ['0x' + hole.address.toString(16), bytes(hole.bytes), bound(hole.before), bound(hole.after)]));
}
