//! Tables whose lines are written one by one: widths are fixed in advance, to fit the terminal.

use crate::options::TableOptions;
use crate::text;
use console::{Term, measure_text_width, style, truncate_str};

/// The first column may be narrowed to the first width before other columns are left out, and finally to the second.
const NAME: (usize, usize) = (20, 8);
const GAP: usize = 2;

/// A column. The first of a table is aligned left, the others right.
#[derive(Clone, Copy)]
pub struct Column {
    pub name: &'static str,
    /// The unit or variant: printed beside the name, or below it if there is no room.
    pub of: &'static str,
    /// The minimum width of its cells.
    pub width: usize,
    /// Columns with higher ranks are left out first, those of rank 0 never.
    pub rank: u8,
}

impl Column {
    pub const fn new(name: &'static str, of: &'static str, width: usize, rank: u8) -> Column {
        Column {
            name,
            of,
            width,
            rank,
        }
    }
}

pub struct Cell {
    text: String,
    good: Option<bool>,
}

impl Cell {
    /// Creates a cell with a dash if there is no value.
    pub fn or_dash(value: Option<impl ToString>) -> Cell {
        let text = value.map(|value| value.to_string());
        text.as_deref().unwrap_or("-").into()
    }

    /// Creates a cell with a verdict, coloured on a terminal.
    pub fn verdict(text: String, good: bool) -> Cell {
        Cell {
            text,
            good: Some(good),
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell {
            text: text::escape(&text.into()),
            good: None,
        }
    }
}

pub struct Table {
    columns: Vec<Column>,
    /// The width of each column; none if it is left out.
    widths: Vec<Option<usize>>,
    fitted: bool,
}

impl Table {
    /// Creates a table whose first column names traces.
    pub fn of_traces(options: &TableOptions, mut columns: Vec<Column>) -> Table {
        let files = options.files.iter();
        let names = files.map(|path| measure_text_width(&text::escape(&text::trace_name(path))));
        columns.insert(0, Column::new("trace", "", names.max().unwrap_or(0), 0));
        let terminal = if options.wide { None } else { width() };
        Table::new(columns, terminal)
    }

    /// Creates a table for a terminal of this width; without a terminal all columns are shown.
    fn new(columns: Vec<Column>, terminal: Option<usize>) -> Table {
        let beside = |column: &Column| match column.of {
            "" => column.name.len(),
            of => column.name.len() + 1 + of.len(),
        };
        let widths = columns.iter().map(|c| Some(c.width.max(beside(c))));
        let mut table = Table {
            widths: widths.collect(),
            columns,
            fitted: false,
        };
        if let Some(terminal) = terminal.filter(|terminal| table.width() > *terminal) {
            table.fit(terminal);
        }
        table
    }

    fn fit(&mut self, terminal: usize) {
        self.fitted = true;
        for (width, column) in self.widths.iter_mut().zip(&self.columns) {
            *width = Some(column.width.max(column.name.len()).max(column.of.len()));
        }
        self.narrow(terminal, NAME.0);
        while self.width() > terminal
            && let Some(last) = (0..self.columns.len())
                .filter(|index| self.widths[*index].is_some() && self.columns[*index].rank > 0)
                .max_by_key(|index| self.columns[*index].rank)
        {
            self.widths[last] = None;
        }
        self.narrow(terminal, NAME.1);
    }

    /// Narrows the first column as far as necessary, at most to `least`.
    fn narrow(&mut self, terminal: usize, least: usize) {
        let excess = self.width().saturating_sub(terminal);
        if let Some(Some(first)) = self.widths.first_mut() {
            *first = first.saturating_sub(excess).max(least.min(*first));
        }
    }

    fn width(&self) -> usize {
        let shown = self.widths.iter().flatten();
        let gaps = GAP * shown.clone().count().saturating_sub(1);
        shown.sum::<usize>() + gaps
    }

    pub fn hidden_columns(&self) -> usize {
        self.widths.iter().filter(|width| width.is_none()).count()
    }

    /// Whether the table was fitted, so that long words should be avoided.
    pub fn is_fitted(&self) -> bool {
        self.fitted
    }

    /// Returns the lines above the rows.
    pub fn header(&self) -> Vec<String> {
        let columns = self.columns.iter();
        if self.fitted {
            let names = self.row(columns.clone().map(|column| column.name.into()));
            vec![names, self.row(columns.map(|column| column.of.into()))]
        } else {
            let names = columns.map(|column| format!("{} {}", column.name, column.of));
            vec![self.row(names.map(|name| name.trim_end().into()))]
        }
    }

    pub fn row(&self, cells: impl IntoIterator<Item = Cell>) -> String {
        let mut line = String::new();
        for (index, (width, cell)) in self.widths.iter().zip(cells).enumerate() {
            let Some(width) = *width else { continue };
            let text = match index {
                0 if self.fitted => truncate_str(&cell.text, width, "…").into_owned(),
                _ => cell.text,
            };
            let padding = " ".repeat(width.saturating_sub(measure_text_width(&text)));
            let text = match cell.good {
                Some(true) => style(text).green().to_string(),
                Some(false) => style(text).red().bold().to_string(),
                None => text,
            };
            match index {
                0 => line += &format!("{text}{padding}"),
                _ => line += &format!("{:GAP$}{padding}{text}", ""),
            }
        }
        line
    }
}

/// Returns the width of the terminal that tables go to: `COLUMNS`, else the width of stdout. None without a terminal.
fn width() -> Option<usize> {
    let columns = std::env::var("COLUMNS").ok();
    let columns = columns.and_then(|text| text.parse().ok());
    let terminal = Term::stdout();
    // Some terminals do not report their width.
    let width = || terminal.size_checked().map(|(_, width)| width.into());
    let width = || terminal.is_term().then(|| width().unwrap_or(80));
    columns.filter(|columns| *columns > 0).or_else(width)
}
