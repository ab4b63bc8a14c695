//! Formats tables for the command line's text output: columns without lines between them.

use comfy_table::{CellAlignment, Row, Table, presets};

/// Returns a figure as text; `?` if it is unknown.
pub(super) fn known(figure: Option<impl ToString>) -> String {
    figure.map_or_else(|| "?".to_owned(), |figure| figure.to_string())
}

/// Formats a table. `headings` are separated by two spaces; the column of a heading that begins
/// with `>` is aligned to the right. Without any word in the headings, the table has none.
pub(super) fn table<R: Into<Row>>(headings: &str, rows: impl IntoIterator<Item = R>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).add_rows(rows);
    let words: Vec<&str> = headings.split("  ").collect();
    let names = words.iter().map(|word| word.trim_start_matches('>'));
    if names.clone().any(|name| !name.is_empty()) {
        table.set_header(names);
    }
    for (at, _) in words.iter().enumerate().filter(|w| w.1.starts_with('>')) {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}
