//! Draws the display of `memfold top`.

use std::fmt::Write as _;

use memfold_api::{SwapPlace, VmSwap};
use memfold_ledger::memory_map::{self, MemoryMap};
use memfold_ledger::table::signed;
use memfold_ledger::{Level, Report, VmAccount};
use memfold_units::{ByteSize, PAGE_SIZE};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use crate::cli::table::known;

use super::view::{COLUMNS, SAMPLES, Sort, View};

/// Widths of the table's columns, in characters.
const NAME: u16 = 20;
const DOMAIN: u16 = 10;
const FIGURE: u16 = 9;
const HISTORY: u16 = 24;

/// Bars with heights from one to eight eighths of a line.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Symbol and colour of each page state in a memory map, in the order of
/// [`memfold_ledger::memory_map::STATES`]. Each state has its own symbol, so the map is readable
/// without colours.
const STATES: [(char, Color); 7] = [
    ('█', Color::Red),
    ('▓', Color::Yellow),
    ('▒', Color::Green),
    ('░', Color::Cyan),
    ('0', Color::Blue),
    ('s', Color::Magenta),
    ('·', Color::DarkGray),
];

const KEYS: &str = " ↑↓ choose  ⏎ memory map  s S sort by next, previous column  r turn round  n by name  p pause  ? help  q quit";
const MAP_KEYS: &str = " ↑↓ next VM  Esc back  p pause  ? help  q quit";

/// Draws the display. Returns the number of cells for which a memory map has room.
pub(super) fn draw(frame: &mut Frame, view: &View) -> u64 {
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(5),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(host(view)), head);
    let (cells, keys) = if view.detail.is_some() {
        (vm(frame, view, body), MAP_KEYS)
    } else {
        table(frame, view, body);
        (map_cells(body), KEYS)
    };
    frame.render_widget(Paragraph::new(keys).style(Style::new().dim()), foot);
    if view.shows_help {
        help(frame, body);
    }
    cells
}

/// Formats the host's figures in five lines.
fn host(view: &View) -> Vec<Line<'static>> {
    let mut first = vec![Span::from(" memfold top ").bold().reversed()];
    let count = view.report.as_ref().map_or(0, |report| report.vms.len());
    let s = if count == 1 { "" } else { "s" };
    let seconds = view.interval.as_secs_f64();
    first.push(format!("  {count} VM{s}, every {seconds} s").into());
    if view.is_paused {
        first.push("  paused".bold().yellow());
    }
    let mut lines = vec![Line::from(first)];
    if let Some(report) = &view.report {
        lines.extend(figures(report));
    }
    if let Some(error) = &view.error {
        let words = format!(" {error}; trying again");
        lines.push(Line::from(words).red().bold());
    } else if let Some(wrong) = view.report.as_ref().and_then(|r| r.disagreements.first()) {
        lines.push(Line::from(format!(" does not agree: {wrong}")).red());
    } else if view.report.is_none() {
        lines.push(Line::from(" waiting for the daemon").dim());
    }
    lines
}

fn figures(report: &Report) -> Vec<Line<'static>> {
    let host = &report.host;
    let total = host.mem_total_bytes;
    let used = total - host.mem_available_bytes.min(total);
    let ours = host.physical_bytes.min(used);
    let mut memory = vec![Span::from(" memory ")];
    let others = used - ours;
    let drawn = [(ours.0, '█', Color::Green), (others.0, '▒', Color::Blue)];
    memory.extend(bar(30, total.0, &drawn));
    let words = format!(
        " VMs, page stores, memfold {}; others {others}; available {} of {total}",
        host.physical_bytes, host.mem_available_bytes
    );
    memory.push(words.into());
    let zero = i64::try_from(host.saved_by_zero_drop_bytes.0).unwrap_or(i64::MAX);
    let parts = [
        ("folding", host.saved_by_folding_bytes),
        ("clones", host.saved_by_clones_bytes),
        ("segments", host.saved_by_segments_bytes),
        ("KSM", host.saved_by_ksm_bytes),
        ("zero pages", zero),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes != 0);
    let parts: Vec<String> = parts
        .map(|(name, bytes)| format!("{name} {}", signed(*bytes)))
        .collect();
    let saved = Line::from(vec![
        Span::from(" saved  "),
        Span::from(signed(host.saved_net_bytes)).bold(),
        if parts.is_empty() {
            " less memfold itself; nothing is shared yet".into()
        } else {
            format!(" less memfold itself: {}", parts.join(", ")).into()
        },
    ]);
    let mut lines = vec![Line::from(memory), saved];
    if let Some(debt) = &report.debt {
        let colour = match debt.level {
            Level::Ok => Color::Green,
            Level::Warning => Color::Yellow,
            Level::Braked => Color::Red,
        };
        let words = format!(
            " owed   {}, needed at once {}, available for it {}: ",
            ByteSize(debt.debt_bytes),
            ByteSize(debt.needed_bytes),
            ByteSize(debt.absorbable_bytes)
        );
        let level = Span::from(debt.level.to_string()).fg(colour).bold();
        lines.push(Line::from(vec![words.into(), level]));
    }
    lines
}

/// Makes a bar whose parts are in proportion to `whole`.
fn bar(width: u64, whole: u64, parts: &[(u64, char, Color)]) -> Vec<Span<'static>> {
    let (mut sum, mut drawn) = (0, 0);
    let mut spans = Vec::new();
    for (bytes, glyph, colour) in parts {
        sum += bytes;
        // The end is computed from the sum so far, so that rounding errors do not add up.
        let end = sum.saturating_mul(width) / whole.max(1);
        let text: String = (drawn..end).map(|_| *glyph).collect();
        spans.push(Span::from(text).fg(*colour));
        drawn = end;
    }
    let rest: String = (drawn..width).map(|_| '·').collect();
    spans.push(Span::from(rest).dim());
    spans
}

/// Returns the number of columns of figures that fit, and whether the history fits.
fn columns(width: u16) -> (usize, bool) {
    let figures = |rest: u16| {
        let room = rest.saturating_sub(NAME + DOMAIN + 2) / (FIGURE + 1);
        usize::from(room).clamp(1, COLUMNS.len())
    };
    let with = figures(width.saturating_sub(HISTORY + 1));
    // The history takes precedence over the last columns.
    if with >= 4 {
        (with, true)
    } else {
        (figures(width), false)
    }
}

fn table(frame: &mut Frame, view: &View, area: Rect) {
    let (shown, has_history) = columns(area.width);
    // The column by which the rows are sorted is always shown.
    let mut columns: Vec<usize> = (0..shown).collect();
    if let Sort::Figure(number) = view.sort {
        if number >= shown {
            columns[shown - 1] = number;
        }
    }
    let mark = |sort: Sort, name: &str| {
        let arrow = if view.is_turned { '▲' } else { '▼' };
        let bold = Style::new().bold();
        if view.sort == sort {
            Line::styled(format!("{name}{arrow}"), bold.underlined())
        } else {
            Line::styled(name.to_owned(), bold)
        }
    };
    let mut header = vec![mark(Sort::Name, "VM"), mark(Sort::Domain, "domain")];
    let mut widths = vec![Constraint::Length(NAME), Constraint::Length(DOMAIN)];
    for &number in &columns {
        header.push(mark(Sort::Figure(number), COLUMNS[number].name).right_aligned());
        widths.push(Constraint::Length(FIGURE));
    }
    if has_history {
        header.push(Line::from(" PSS over time").bold());
        widths.push(Constraint::Length(HISTORY));
    }
    let rows = view.rows();
    let rows = rows.iter().map(|vm| {
        let mut cells = vec![
            Cell::from(vm.name.clone()),
            Cell::from(vm.domain.clone().unwrap_or_else(|| "-".into())),
        ];
        for &number in &columns {
            let bytes = (COLUMNS[number].of)(vm);
            let line = Line::from(bytes.to_string()).right_aligned();
            let line = if bytes.0 == 0 { line.dim() } else { line };
            cells.push(line.into());
        }
        if has_history {
            cells.push(Cell::from(format!(" {}", history(view, vm))));
        }
        Row::new(cells)
    });
    let table = Table::new(rows, widths)
        .header(Row::new(header))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected(view.selected_row());
    frame.render_stateful_widget(table, area, &mut state);
    if view
        .report
        .as_ref()
        .is_some_and(|report| report.vms.is_empty())
    {
        let none = Paragraph::new(" no VMs: start one with 'memfold vm run'").dim();
        let [_, below] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
        frame.render_widget(none, below);
    }
}

/// Draws the last samples as bars, scaled between their minimum and maximum.
fn history(view: &View, vm: &VmAccount) -> String {
    let Some(samples) = view.history.get(&vm.name) else {
        return String::new();
    };
    let room = usize::from(HISTORY - 1).min(SAMPLES);
    let last = samples.iter().skip(samples.len().saturating_sub(room));
    let least = last.clone().min().copied().unwrap_or(0);
    let most = last.clone().max().copied().unwrap_or(0);
    // Variations below a hundredth are drawn as a flat line.
    let span = (most - least).max(most / 100).max(1);
    let bar = |bytes: &u64| {
        let eighth = (bytes - least).saturating_mul(7) / span;
        BARS[usize::try_from(eighth).unwrap_or(7).min(7)]
    };
    last.map(bar).collect()
}

/// Returns the areas of a VM's figures and of its memory map.
fn map_area(area: Rect) -> (Rect, Rect) {
    let [figures, map] = Layout::vertical([Constraint::Length(12), Constraint::Min(1)]).areas(area);
    (figures, map)
}

fn map_cells(area: Rect) -> u64 {
    let (_, map) = map_area(area);
    // The area inside the border.
    u64::from(map.width.saturating_sub(2)) * u64::from(map.height.saturating_sub(2))
}

/// Draws one VM: the places of its RAM, and its memory map.
fn vm(frame: &mut Frame, view: &View, area: Rect) -> u64 {
    let (top, below) = map_area(area);
    let name = view.detail.as_deref().unwrap_or_default();
    let Some(account) = view.detail_vm() else {
        let gone = format!(" VM '{name}' has ended (Esc: back)");
        frame.render_widget(Paragraph::new(gone).yellow(), top);
        return map_cells(area);
    };
    frame.render_widget(Paragraph::new(parts(view, account)), top);
    let title = match &view.map {
        Some(map) => format!(
            " RAM from its first byte, {} a character, by what most of its pages are ",
            ByteSize(map.cell_bytes)
        ),
        None => " reading the memory map ".to_owned(),
    };
    let text = view.map.as_ref().map_or_else(Vec::new, |map| {
        lines(map, usize::from(below.width.saturating_sub(2)).max(1))
    });
    let block = Block::bordered().title(title);
    frame.render_widget(Paragraph::new(text).block(block), below);
    map_cells(area)
}

fn parts(view: &View, vm: &VmAccount) -> Vec<Line<'static>> {
    let owed = view.report.as_ref().and_then(|report| report.debt.as_ref());
    let owed = owed.and_then(|debt| debt.vms.iter().find(|of| of.name == vm.name));
    let domain = vm.domain.clone().unwrap_or_else(|| "no domain".into());
    let mut lines = vec![Line::from(vec![
        Span::from(format!(" {} ", vm.name)).bold().reversed(),
        format!("  {domain}, process {}, RAM {}", vm.pid, vm.ram_bytes).into(),
    ])];
    let places = [
        vm.private_bytes,
        vm.unfolded_bytes,
        vm.folded_bytes,
        vm.file_resident_bytes + vm.file_untouched_bytes,
        vm.zero_bytes,
        vm.swapped_bytes,
        vm.free_bytes,
    ];
    let states = STATES.iter().zip(memory_map::STATES);
    for (bytes, ((glyph, colour), name)) in places.iter().zip(states) {
        let size = bytes.to_string();
        let mut spans = vec![Span::from(format!(" {glyph} {name:9} {size:>9} "))];
        spans.extend(bar(40, vm.ram_bytes.0, &[(bytes.0, *glyph, *colour)]));
        lines.push(Line::from(spans));
    }
    let mut rest = format!(
        " PSS {}, of it QEMU {}; merged by KSM {}; huge pages {}; {} mappings",
        vm.pss_bytes,
        vm.overhead_bytes(),
        known(vm.ksm_merged_bytes),
        vm.huge_bytes,
        vm.mappings
    );
    if let Some(owed) = owed {
        let _ = write!(rest, "; owes {}", ByteSize(owed.total_bytes()));
    }
    lines.push(Line::from(rest));
    if let Some(map) = &view.map {
        let segments = map.segments.iter().map(|s| {
            let (resident, all) = (ByteSize(s.resident_bytes), ByteSize(s.bytes));
            format!("{} {resident} of {all}", s.segment)
        });
        let segments: Vec<String> = segments.collect();
        if !segments.is_empty() {
            lines.push(Line::from(format!(" segments: {}", segments.join(", "))));
        }
    }
    lines.extend(view.swap.as_ref().map(|disk| Line::from(swap(disk))));
    lines
}

/// Describes the place of the swap disk, which is not part of RAM and so not of the map.
fn swap(disk: &VmSwap) -> String {
    let size = ByteSize(disk.bytes);
    let who = |copy: usize| {
        let lenders = disk.lent.iter().filter(|part| part.copy == copy);
        let lenders: Vec<&str> = lenders.map(|part| part.lender.as_str()).collect();
        lenders.join(", ")
    };
    let place = match disk.place {
        SwapPlace::Lent | SwapPlace::Degraded => &*format!("on lent memory of {}", who(0)),
        SwapPlace::OnCopy => "on this host's disk, no longer lent",
        SwapPlace::OnDisk => "on this host's disk",
        SwapPlace::Lost => "LOST with its lender",
    };
    let mut text = format!(" swap: {size} {place}");
    if disk.lent.iter().any(|part| part.copy == 1) {
        let _ = write!(text, ", and again of {}", who(1));
    }
    if disk.place == SwapPlace::Degraded {
        text.push_str(", with fewer copies than were asked for");
    }
    text
}

/// Draws the cells of a memory map, as lines.
fn lines(map: &MemoryMap, width: usize) -> Vec<Line<'static>> {
    let span = |cell: &[u64; 7]| {
        let most = cell.iter().enumerate().max_by_key(|(_, pages)| **pages);
        let (glyph, colour) = most.map_or((' ', Color::Reset), |(state, _)| STATES[state]);
        Span::from(glyph.to_string()).fg(colour)
    };
    map.cells
        .chunks(width)
        .map(|cells| Line::from(cells.iter().map(span).collect::<Vec<_>>()))
        .collect()
}

fn help(frame: &mut Frame, area: Rect) {
    let columns = COLUMNS.iter().map(|column| {
        let name = Span::from(format!("{:9} ", column.name)).bold();
        Line::from(vec![name, column.meaning.into()])
    });
    let mut lines: Vec<Line> = columns.collect();
    lines.push(Line::default());
    lines.push(Line::from(format!(
        "A memory map shows what most pages of each piece are; a page has {PAGE_SIZE} bytes. \
         Columns that have no room are shown when they are sorted by."
    )));
    lines.push(Line::from("Any key closes this."));
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX) + 4;
    let [middle] = Layout::vertical([Constraint::Length(height)]).areas(area);
    let text = Paragraph::new(lines)
        .wrap(Wrap { trim: false })
        .block(Block::bordered().title(" what the columns mean "));
    frame.render_widget(Clear, middle);
    frame.render_widget(text, middle);
}

#[cfg(test)]
mod tests {
    use crossterm::event::KeyCode;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::view::tests::{press, report, with};
    use super::super::view::{Asked, News};
    use super::*;
    use memfold_api::LentPart;
    use memfold_ledger::DebtReport;
    use memfold_ledger::memory_map::MappedSegment;
    use memfold_lend::Durability;

    /// Returns the text on the screen, and the number of cells of a map.
    fn screen(view: &View, width: u16, height: u16) -> (String, u64) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let mut cells = 0;
        terminal.draw(|frame| cells = draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let lines = buffer.content.chunks(usize::from(width));
        let text: Vec<String> = lines
            .map(|line| line.iter().map(ratatui::buffer::Cell::symbol).collect())
            .collect();
        (text.join("\n"), cells)
    }

    #[test]
    fn memfold_top_shows_more_columns_on_a_wide_screen_and_always_the_sort_column() {
        let mut view = with(&[("web", 100), ("database", 200)]);
        let (wide, _) = screen(&view, 180, 20);
        for text in [
            "VM",
            "PSS▼",
            "folded",
            "QEMU",
            "PSS over time",
            "web",
            "200 MiB",
        ] {
            assert!(wide.contains(text), "{text}: {wide}");
        }
        let database = wide.lines().position(|line| line.contains("database"));
        let web = wide.lines().position(|line| line.contains("web"));
        assert!(database < web, "{wide}");
        let (narrow, _) = screen(&view, 80, 20);
        assert!(!narrow.contains("QEMU"), "{narrow}");
        press(&mut view, KeyCode::Char('n'));
        press(&mut view, KeyCode::Char('S'));
        let (sorted, _) = screen(&view, 80, 20);
        assert!(sorted.contains("needs▼"), "{sorted}");
        // Drawing stays inside the screen, however small the screen is.
        for (width, height) in [(1, 1), (20, 4), (300, 3)] {
            screen(&view, width, height);
        }
    }

    #[test]
    fn memfold_top_shows_the_memory_of_the_host_the_brake_and_errors() {
        let mut view = with(&[]);
        assert!(screen(&view, 100, 20).0.contains("no VMs"));
        let mut told = report(&[("a", 1)]);
        told.host.mem_total_bytes = ByteSize::mib(1000);
        told.host.mem_available_bytes = ByteSize::mib(400);
        told.host.physical_bytes = ByteSize::mib(300);
        told.host.saved_by_folding_bytes = 7 << 20;
        told.debt = Some(DebtReport {
            level: Level::Braked,
            debt_bytes: 5 << 20,
            ..DebtReport::default()
        });
        view.take(News::Report(Box::new(told)));
        let (text, _) = screen(&view, 140, 20);
        assert!(
            text.contains("others 300 MiB; available 400 MiB of 0.98 GiB"),
            "{text}"
        );
        assert!(text.contains("folding 7.00 MiB"), "{text}");
        assert!(text.contains("BRAKED"), "{text}");
        // The bar has 30 characters: 9 for VMs with 300 MiB, 9 for other processes.
        assert!(text.contains("█████████▒▒▒▒▒▒▒▒▒············"), "{text}");
        view.take(News::Failed("the daemon doesn't answer".into()));
        let (text, _) = screen(&view, 140, 20);
        assert!(
            text.contains("the daemon doesn't answer; trying again"),
            "{text}"
        );
        assert!(
            text.contains("\na "),
            "what was known is still shown: {text}"
        );
        press(&mut view, KeyCode::Char('?'));
        assert!(screen(&view, 140, 30).0.contains("merged by ksmd"));
    }

    #[test]
    fn each_cell_of_the_memory_map_in_memfold_top_shows_its_most_frequent_class_of_pages() {
        let mut view = with(&[("a", 100)]);
        assert_eq!(press(&mut view, KeyCode::Enter), Asked::Fetch);
        let (waiting, room) = screen(&view, 60, 30);
        assert!(waiting.contains("reading the memory map"), "{waiting}");
        assert_eq!(room, 58 * (30 - 5 - 1 - 12 - 2));
        let mut cells = vec![[0, 0, 0, 0, 0, 0, 9]; 58];
        cells[0] = [5, 4, 0, 0, 0, 0, 0];
        cells[1] = [1, 0, 8, 0, 0, 0, 0];
        view.take(News::Map(Box::new(MemoryMap {
            vm: "a".into(),
            ram_bytes: 1,
            cell_bytes: 9 << 12,
            states: Vec::new(),
            cells,
            places: Vec::new(),
            segments: vec![MappedSegment {
                segment: "base@3".into(),
                bytes: 2 << 20,
                resident_bytes: 1 << 20,
            }],
        })));
        let (text, _) = screen(&view, 60, 30);
        assert!(text.contains("│█▒····"), "{text}");
        assert!(text.contains("36.0 KiB a character"), "{text}");
        assert!(text.contains("base@3"), "{text}");
        assert!(!text.contains("swap:"), "{text}");
        let lent = |lender: &str, copy| LentPart {
            lender: lender.into(),
            bytes: 1 << 20,
            copy,
        };
        let disk = VmSwap {
            bytes: 1 << 20,
            place: SwapPlace::Lent,
            durability: Some(Durability::Replica),
            lent: vec![lent("north", 0), lent("south", 1)],
        };
        view.take(News::Swap("b".into(), Some(disk.clone())));
        assert!(!screen(&view, 80, 30).0.contains("swap:"), "another VM's");
        view.take(News::Swap("a".into(), Some(disk.clone())));
        let wanted = "swap: 1.00 MiB on lent memory of north, and again of south";
        let (text, _) = screen(&view, 80, 30);
        assert!(text.contains(wanted), "{text}");
        for (place, words) in [
            (SwapPlace::Degraded, "fewer copies"),
            (SwapPlace::OnCopy, "no longer lent"),
            (SwapPlace::OnDisk, "on this host's disk"),
            (SwapPlace::Lost, "LOST"),
        ] {
            let disk = VmSwap {
                place,
                ..disk.clone()
            };
            assert!(super::swap(&disk).contains(words), "{disk:?}");
        }
        view.take(News::Report(Box::new(report(&[]))));
        assert!(screen(&view, 60, 30).0.contains("VM 'a' has ended"));
    }
}
