// What grew and what shrank from one file to another. The command has summed up both.
const files = { instant: 'peak', group: meta.difference?.groups.all.context.length > 1 ? 'context' : 'size' };

function changes() {
  return meta.difference.groups[files.instant][files.group].map(([name, blocks, amount, blocksAfter, amountAfter]) =>
    ({ name, blocks, amount, blocksAfter, amountAfter, change: amountAfter - amount }));
}

function drawFiles() {
  if (!meta.difference) return;
  const lines = changes().slice(0, 12), page = begin('files-canvas'), { pen, width, height } = page;
  const high = Math.max(1, ...lines.map(of => Math.abs(of.change))), each = height / Math.max(1, lines.length);
  const middle = width / 2, most = width / 2 - 110;
  lines.forEach((of, n) => {
    const long = Math.abs(of.change) / high * most, grows = of.change >= 0, y = n * each + each / 2 + 4;
    pen.fillStyle = grows ? '#d55e00' : '#0072b2';
    pen.fillRect(grows ? middle : middle - long, n * each + 2, Math.max(long, 1), each - 4);
    pen.fillStyle = page.ink;
    pen.textAlign = grows ? 'left' : 'right';
    pen.fillText((grows ? '+' : '') + bytes(of.change), middle + (grows ? long + 4 : -long - 4), y);
    // The name is on the other side.
    pen.textAlign = grows ? 'right' : 'left';
    pen.fillText(of.name.length > 70 ? '…' + of.name.slice(-69) : of.name, middle + (grows ? -6 : 6), y, width / 2 - 10);
  });
  pen.textAlign = 'left';
  const both = begin('files-curves'), curves = [['before', '#0072b2', []], ['after', '#d55e00', [6, 3]]];
  const top = Math.max(1, ...curves.flatMap(([name]) => meta.difference[name].curve));
  for (const [name, colour, dashes] of curves) {
    const curve = meta.difference[name].curve;
    both.pen.strokeStyle = colour;
    both.pen.setLineDash(dashes);
    both.pen.lineWidth = 1.5;
    both.pen.beginPath();
    curve.forEach((amount, n) => both.pen.lineTo((n + 0.5) / curve.length * both.width, both.height * (1 - amount / top / 1.05)));
    both.pen.stroke();
  }
  both.pen.fillStyle = both.ink;
  both.pen.fillText(bytes(top), 4, 12);
}

function showFiles() {
  const both = meta.difference;
  if (!both) return;
  $('files').hidden = false;
  const change = (what, before, after) => what + ' ' + bytes(before) + ' to ' + bytes(after) + ' (' +
    (after < before ? '' : '+') + bytes(after - before) + ')';
  $('files-words').textContent = 'From ' + both.before.name + ' to ' + both.after.name + ': ' + [
    change('most requested', both.before.requested, both.after.requested),
    change('most reserved', both.before.reserved, both.after.reserved)].join(', ') + ', rows ' + both.before.rows +
    ' to ' + both.after.rows + (both.before.error === null ? '' : '. The first ends early: ' + both.before.error) + '.';
  legend($('files-legend'), [[both.before.name + ' (line)', '#0072b2'], [both.after.name + ' (dashes)', '#d55e00']]);
  table($('files-table'), 'Requested, the largest change first', [files.group, 'blocks before', 'after', 'bytes before', 'after', 'change'],
    changes().map(of => [of.name, of.blocks, of.blocksAfter, bytes(of.amount), bytes(of.amountAfter),
      (of.change < 0 ? '' : '+') + bytes(of.change)]));
  for (const key of ['instant', 'group']) {
    $('files-' + key).value = files[key];
    $('files-' + key).onchange = event => { files[key] = event.target.value; showFiles(); };
  }
  drawFiles();
}
