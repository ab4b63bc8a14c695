//! `memfold top`: shows how the host's memory is used, and updates the display periodically. On a
//! terminal, users can select and sort with keys.

mod draw;
mod view;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use clap::Args;
use crossterm::event::{self, Event};
use memfold_api::{Client, FullReport, VmInfo};
use memfold_ledger::memory_map::MemoryMap;
use memfold_ledger::{Report, table};

use self::view::{Asked, News, View};
use super::context::{Context, write_on};
use super::number::number;

/// Time between two checks for keys and for data from the daemon.
const TICK: Duration = Duration::from_millis(50);

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Seconds between two updates, 0.5 to 3600; for each update, the daemon reads every page table
    #[arg(long, short = 'n', value_name = "SECONDS", default_value = "2", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = number(text, 0.5..=3600.0, "give 0.5 to 3600 seconds");
    seconds.map(Duration::from_secs_f64)
}

/// Prints reports as JSON (`--json`), one in each line, until the reader closes the output.
fn json_lines(client: &Client, interval: Duration) -> anyhow::Result<ExitCode> {
    loop {
        let report: FullReport = client.get("/v1/report")?;
        if !write_on(&serde_json::to_string(&report)?)? {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(interval);
    }
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    if context.json {
        return json_lines(&client, arguments.interval);
    }
    if io::stdout().is_terminal() && io::stdin().is_terminal() {
        // This comes before the screen is switched, so that an error appears on the normal screen.
        let first: FullReport = client.get("/v1/report")?;
        on_terminal(client, first.ledger, arguments.interval)?;
    } else {
        in_pipe(arguments.interval, || {
            Ok(client.get::<FullReport>("/v1/report")?.ledger)
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints reports until Ctrl-C, or until the reader closes the output.
fn in_pipe(
    interval: Duration,
    mut fetch: impl FnMut() -> anyhow::Result<Report>,
) -> anyhow::Result<()> {
    let stop = interrupts()?;
    loop {
        if !write_on(&table::render(&fetch()?))? {
            return Ok(());
        }
        match stop.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(result) => return Ok(result?),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Memory map that is to be fetched from now on: name of the VM, and number of cells; `None`: no
/// map.
type Wish = Option<(String, u64)>;

/// Fetches data from the daemon every `interval`, and at once when another memory map is requested
/// (`wishes`). This function runs on its own thread, so that a slow daemon does not delay keys.
fn fetch(client: &Client, interval: Duration, wishes: &Receiver<Wish>, news: &Sender<News>) {
    let mut wish = None;
    let tell = |answer: Result<News, memfold_api::ClientError>| {
        news.send(answer.unwrap_or_else(|error| {
            let error = anyhow::Error::from(error);
            News::Failed(format!("{error:#}"))
        }))
    };
    loop {
        match wishes.recv_timeout(interval) {
            // If there are several wishes, only the last one counts.
            Ok(new) => wish = wishes.try_iter().last().unwrap_or(new),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let report = client.get::<FullReport>("/v1/report");
        let mut told = tell(report.map(|report| News::Report(Box::new(report.ledger))));
        if let Some((vm, cells)) = &wish {
            let path = format!("/v1/vms/{vm}/memory-map?cells={cells}");
            // This fails if the VM has just ended; the report shows its end.
            if let Ok(map) = client.get::<MemoryMap>(&path) {
                told = told.and_then(|()| tell(Ok(News::Map(Box::new(map)))));
            }
            if let Ok(vms) = client.get::<Vec<VmInfo>>("/v1/vms") {
                let found = vms.into_iter().find(|of| of.name == *vm);
                let news = News::Swap(vm.clone(), found.and_then(|vm| vm.swap));
                told = told.and_then(|()| tell(Ok(news)));
            }
        }
        if told.is_err() {
            return;
        }
    }
}

fn on_terminal(client: Client, first: Report, interval: Duration) -> anyhow::Result<()> {
    let stop = interrupts()?;
    let (wish, wishes) = mpsc::channel();
    let (tell, news) = mpsc::channel();
    std::thread::Builder::new()
        .name("top-fetch".to_owned())
        .spawn(move || fetch(&client, interval, &wishes, &tell))?;
    let mut view = View::new(interval);
    view.take(News::Report(Box::new(first)));
    // `ratatui::init` restores the terminal, also after a panic.
    let mut terminal = ratatui::try_init()?;
    let result = keys(&mut terminal, &mut view, &wish, (&news, &stop));
    ratatui::restore();
    result
}

fn keys(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut View,
    wish: &Sender<Wish>,
    (news, stop): (&Receiver<News>, &Receiver<io::Result<()>>),
) -> anyhow::Result<()> {
    let mut cells = 0;
    let mut is_stale = true;
    loop {
        if is_stale {
            let before = cells;
            terminal.draw(|frame| cells = draw::draw(frame, view))?;
            // The terminal's size has changed.
            if cells != before && view.detail.is_some() {
                let _ = wish.send(view.detail.clone().map(|vm| (vm, cells)));
            }
        }
        is_stale = false;
        if event::poll(TICK)? {
            let asked = match event::read()? {
                Event::Key(key) => view.key(key),
                _ => Asked::Nothing,
            };
            match asked {
                Asked::Quit => return Ok(()),
                // This fails if the thread has ended; its error was reported.
                Asked::Fetch => drop(wish.send(view.detail.clone().map(|vm| (vm, cells)))),
                Asked::Nothing => {}
            }
            is_stale = true;
        }
        while let Ok(told) = news.try_recv() {
            view.take(told);
            is_stale = true;
        }
        if !matches!(stop.try_recv(), Err(TryRecvError::Empty)) {
            return Ok(());
        }
    }
}

/// Returns a channel that receives once, at Ctrl-C.
fn interrupts() -> io::Result<Receiver<io::Result<()>>> {
    let (send, receive) = mpsc::channel();
    // Sending fails if the view has ended by an error.
    at_interrupt(move |result| drop(send.send(result)))?;
    Ok(receive)
}

/// Calls `work` once, at Ctrl-C. From now on, Ctrl-C does not end the process by itself.
pub(super) fn at_interrupt(work: impl FnOnce(io::Result<()>) + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    std::thread::Builder::new()
        .name("ctrl-c".to_owned())
        .spawn(move || work(runtime.block_on(tokio::signal::ctrl_c())))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_memfold_top_cannot_fetch_a_report_into_a_pipe_it_ends_with_the_error() {
        let error = in_pipe(TICK, || Err(anyhow::anyhow!("no daemon"))).unwrap_err();
        assert_eq!(error.to_string(), "no daemon");
    }

    #[test]
    fn memfold_top_refuses_an_interval_below_half_a_second_or_above_an_hour() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0.4", "3601", "-1", "NaN", "inf", "soon"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
