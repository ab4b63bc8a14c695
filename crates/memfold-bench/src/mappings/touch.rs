//! A thread that touches memory, as a vCPU does, and measures how long each touch takes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_sys::region::Area;
use serde_json::{Map, Value, json};

use super::layout::{Layout, first_word};

/// Time between two touches.
const PAUSE: Duration = Duration::from_micros(100);

/// Touches that a thread does at least: on a machine that is busy with other programs, the thread
/// may get its first turn when the time is over.
const LEAST: usize = 2 * KINDS.len();

/// A touch that took less is not corrected by the time for which the thread waited for a CPU.
const SHORT: Duration = Duration::from_micros(20);

/// Kinds of touches, in turn: the name, and what happens in folded memory.
const KINDS: [&str; 4] = [
    // A page of zeroes is allocated, in any memory.
    "write_fresh",
    // The page store's page is mapped. In unfolded memory, the page is there.
    "read_run",
    // The page store's page is copied. In unfolded memory, the page is there.
    "write_run",
    // Nothing happens, unless KSM has merged the page or something else has unmapped it.
    "write_ordinary",
];

/// Duration of one touch in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Touch {
    wall_ns: u64,
    /// Without the time for which the thread was ready to run and waited for a CPU, because other
    /// programs ran.
    own_ns: u64,
}

/// Durations of all touches.
#[derive(Debug, Default)]
pub struct Touches([Vec<Touch>; KINDS.len()]);

/// Time for which the calling thread was ready to run and waited for a CPU
/// (`/proc/PID/schedstat`, `Documentation/scheduler/sched-stats.rst`).
struct CpuWait(File);

impl CpuWait {
    fn open() -> io::Result<Self> {
        File::open("/proc/thread-self/schedstat").map(Self)
    }

    /// Returns nanoseconds since the thread began.
    fn read(&self) -> io::Result<u64> {
        let mut text = [0; 64];
        let length = self.0.read_at(&mut text, 0)?;
        let text = String::from_utf8_lossy(&text[..length]);
        let field = text.split_ascii_whitespace().nth(1);
        let number = field.and_then(|word| word.parse().ok());
        number.ok_or_else(|| io::Error::other("unexpected text in schedstat"))
    }
}

impl Touches {
    /// Touches memory until `stop` is set, but each kind at least twice. Each write writes the word
    /// that is there already.
    pub fn until(stop: &AtomicBool, area: Area, layout: Layout) -> io::Result<Self> {
        // Multiples of a prime: the places are spread over all memory, and none comes twice before
        // all have had their turn.
        const STEP: u64 = 1_000_003;
        let wait = CpuWait::open()?;
        let mut touches = Self::default();
        let mut n = 0;
        while !stop.load(Ordering::Relaxed) || n < LEAST as u64 {
            let place = n / KINDS.len() as u64 * STEP;
            let run = |odd| {
                let (first, pages) = layout.run(layout.touched_run(place, odd));
                first + n / KINDS.len() as u64 % pages
            };
            let kind = usize::try_from(n % KINDS.len() as u64).unwrap_or(0);
            let page = match kind {
                0 => layout.fresh_page(place % layout.fresh_pages()),
                1 => run(1),
                2 => run(0),
                _ => layout.ordinary_page(place % layout.ordinary_pages()),
            };
            let page_area = area.part(page, 1);
            let word = [first_word(page)];
            let waited = wait.read()?;
            let began = Instant::now();
            if kind == 1 {
                // Reads the first word, which is not 0.
                std::hint::black_box(page_area.is_zero());
            } else {
                page_area.write(&word);
            }
            let took = began.elapsed();
            let waited = match took {
                _ if took < SHORT => 0,
                _ => wait.read()?.saturating_sub(waited),
            };
            let wall_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            touches.0[kind].push(Touch {
                wall_ns,
                own_ns: wall_ns.saturating_sub(waited),
            });
            n += 1;
            std::thread::sleep(PAUSE);
        }
        Ok(touches)
    }

    /// Returns count, median, 99th percentile and maximum of the durations in microseconds: of all
    /// touches, and of each kind. `tail_us`: the duration that one of 2, 10, 100... touches
    /// exceeds.
    pub fn summary(&self) -> Value {
        let all: Vec<Touch> = self.0.iter().flatten().copied().collect();
        let mut summary = figures(&all);
        let own = sorted(&all, |touch| touch.own_ns);
        let tail = [2, 10, 100, 1000, 10_000].into_iter();
        let tail = tail.filter(|&n| n <= own.len());
        summary["tail_us"] = tail
            .map(|n| (n.to_string(), us(own[own.len() - 1 - own.len() / n])))
            .collect::<Map<_, _>>()
            .into();
        for (kind, touches) in KINDS.iter().zip(&self.0) {
            summary[*kind] = figures(touches);
        }
        summary
    }
}

fn figures(touches: &[Touch]) -> Value {
    let own = sorted(touches, |touch| touch.own_ns);
    let wall = sorted(touches, |touch| touch.wall_ns);
    json!({
        "touches": touches.len(),
        "median_us": percentile(&own, 50.0),
        "p99_us": percentile(&own, 99.0),
        "longest_us": percentile(&own, 100.0),
        "wall_p99_us": percentile(&wall, 99.0),
        "wall_longest_us": percentile(&wall, 100.0),
    })
}

fn sorted(touches: &[Touch], what: impl Fn(&Touch) -> u64) -> Vec<u64> {
    let mut all: Vec<u64> = touches.iter().map(what).collect();
    all.sort_unstable();
    all
}

fn us(ns: u64) -> Value {
    json!(ns as f64 / 1000.0)
}

/// Returns a percentile of sorted nanoseconds, in microseconds; `null` without values.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an index of the list
pub fn percentile(sorted: &[u64], percent: f64) -> Value {
    let rank = (sorted.len() as f64 * percent / 100.0).ceil() as usize;
    sorted
        .get(rank.max(1) - 1)
        .map_or(Value::Null, |ns| us(*ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_for_which_the_touching_thread_waited_for_a_cpu_is_no_stall() {
        let touch = |wall_ns, own_ns| Touch { wall_ns, own_ns };
        let mut touches = Touches::default();
        touches.0[0] = vec![touch(1000, 1000); 98];
        touches.0[0].extend([touch(9_000_000, 3000), touch(5000, 5000)]);
        let summary = touches.summary();
        assert_eq!(summary["touches"], 100);
        assert_eq!(summary["median_us"], 1.0);
        assert_eq!(summary["p99_us"], 3.0);
        assert_eq!(summary["longest_us"], 5.0);
        assert_eq!(summary["wall_longest_us"], 9000.0);
        assert_eq!(summary["tail_us"]["2"], 1.0);
        assert_eq!(summary["tail_us"]["100"], 3.0);
        assert!(summary["tail_us"]["1000"].is_null());
        assert!(summary["read_run"]["longest_us"].is_null());
    }
}
