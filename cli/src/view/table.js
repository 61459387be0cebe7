// Tables: a click on a head sorts by its column, and each can be copied.
const sorts = new Map();

// What a cell is sorted by: a number where it is one, also with a unit, else its text.
function worth(cell) {
  if (typeof cell === 'number') return cell;
  const text = String(cell), less = text.startsWith('−'), amount = size(less ? text.slice(1) : text);
  return Number.isNaN(amount) ? text : less ? -amount : amount;
}

// Numbers before texts, so that a column of both has an order.
function compare(one, two) {
  const [a, b] = [worth(one), worth(two)];
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === 'number' ? -1 : 1;
}

// Comma-separated values. What a spreadsheet would take for a formula is marked as text.
function csv(head, lines) {
  const cell = of => {
    const text = typeof of === 'string' && /^[=+@\t\r-]/.test(of) && of !== '-' ? "'" + of : String(of);
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return [head, ...lines].map(line => line.map(cell).join(',') + '\n').join('');
}

function copy(text, button) {
  const done = () => { button.textContent = 'Copied'; };
  const asked = navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject();
  asked.then(done, () => {
    // Where a page may not ask for the clipboard.
    const field = element('textarea', text, document.body);
    field.select();
    if (document.execCommand('copy')) done();
    field.remove();
  });
}

function table(where, caption, head, lines) {
  const made = element('table'), title = element('caption', caption + ' ', made);
  const button = element('button', 'Copy as CSV', title);
  const sort = sorts.get(caption);
  const sorted = sort && sort.column < head.length ? [...lines].sort((a, b) =>
    compare(a[sort.column], b[sort.column]) * (sort.down ? -1 : 1)) : lines;
  button.onclick = () => copy(csv(head, sorted), button);
  const top = element('tr', undefined, element('thead', undefined, made));
  head.forEach((word, column) => {
    const cell = element('th', undefined, top);
    cell.scope = 'col';
    const own = sort && sort.column === column;
    if (own) cell.ariaSort = sort.down ? 'descending' : 'ascending';
    if (word === '') return;
    element('button', word + (own ? sort.down ? ' ↓' : ' ↑' : ''), cell).onclick = () => {
      // The largest first, then the smallest, then as it was.
      if (!own) sorts.set(caption, { column, down: true });
      else if (sort.down) sorts.set(caption, { column, down: false });
      else sorts.delete(caption);
      table(where, caption, head, lines);
      where.querySelectorAll('th')[column].querySelector('button').focus();
    };
  });
  const body = element('tbody', undefined, made);
  for (const line of sorted) {
    const row = element('tr', undefined, body);
    for (const cell of line) element('td', cell, row);
  }
  where.replaceChildren(made);
}
