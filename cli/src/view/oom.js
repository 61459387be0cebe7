function drawOutOfMemory() {
  const oom = meta.out_of_memory;
  if (!oom) return;
  $('oom').hidden = false;
  $('oom-words').textContent = 'Asked for ' + bytes(oom.requested) + '; held ' + bytes(oom.reserved) + ', of which ' +
    bytes(oom.allocated) + ' live' + (oom.limit === null ? '' : '; limit ' + bytes(oom.limit)) + '. Cause: ' + oom.cause +
    '. ' + oom.advice;
  const bars = [['asked for', oom.requested, '#d55e00'], ...oom.holes.map((hole, n) => ['hole ' + (n + 1), hole.bytes, '#56b4e9']),
    ...oom.pending.map(of => ['waits for stream ' + of.stream, of.bytes, '#e69f00'])].slice(0, 7);
  const page = begin('oom-canvas'), high = Math.max(1, ...bars.map(bar => bar[1])), each = page.height / bars.length;
  bars.forEach(([name, amount, colour], n) => {
    page.pen.fillStyle = colour;
    page.pen.fillRect(150, n * each + 2, amount / high * (page.width - 260), each - 4);
    page.pen.fillStyle = page.ink;
    page.pen.fillText(name, 4, n * each + each / 2 + 4);
    page.pen.fillText(bytes(amount), 156 + amount / high * (page.width - 260), n * each + each / 2 + 4);
  });
  const bound = block => block === null ? 'no large block' : '0x' + block.toString(16);
  table($('oom-table'), 'The longest holes, and the large live blocks on both sides', ['address', 'bytes', 'before', 'after'],
    oom.holes.map(hole => ['0x' + hole.address.toString(16), bytes(hole.bytes), bound(hole.before), bound(hole.after)]));
  const waits = element('div', undefined, $('oom-table'));
  table(waits, 'What waits', ['stream', 'bytes'], oom.pending.map(of => [of.stream, bytes(of.bytes)]));
}
