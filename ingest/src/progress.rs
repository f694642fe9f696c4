//! The progress of a command: a bar on a terminal, otherwise a plain line every few seconds, always on standard error.
//!
//! Used for everything that may take longer than two seconds. The clock affects only when lines are printed.

use std::io::IsTerminal as _;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use contract::words::plural;
use contract::{counted, note};
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use store::{Manifest, StreamRecord};

/// Time before the first plain line: shorter commands print nothing.
const SILENCE: Duration = Duration::from_secs(2);

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The longest time between two lines that only report that work is still running.
const SELDOM: Duration = Duration::from_secs(60);

/// Time between two updates of the bar.
const BAR_EVERY: Duration = Duration::from_millis(100);

/// The unit of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Bytes.
    Bytes,
    /// Items of this name, in the singular.
    Count(&'static str),
}

impl Measure {
    fn amount(self, count: u64) -> String {
        match self {
            Measure::Bytes => HumanBytes(count).to_string(),
            Measure::Count(name) => counted(count, name),
        }
    }

    fn rate(self, count: u64, seconds: f64) -> String {
        let rate = count as f64 / seconds;
        match self {
            Measure::Bytes => format!("{}/s", HumanBytes(rate as u64)),
            Measure::Count(name) => format!("{rate:.1} {}/s", plural(name)),
        }
    }
}

/// Counts and reports progress.
pub struct Progress {
    /// The task, printed before every line.
    task: &'static str,
    measure: Measure,
    bar: Option<ProgressBar>,
    quiet: bool,
    begun: Instant,
    /// When to print next.
    next: Instant,
    total: u64,
    /// Of the finished files.
    files: u64,
    /// The same, plus the bytes read of the open file.
    done: u64,
    text: u64,
    tokens: u64,
    documents: u64,
}

impl Progress {
    /// Progress towards `total` in this unit.
    pub fn new(task: &'static str, measure: Measure, total: u64, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal() && !quiet;
        let style = ProgressStyle::with_template("{prefix} {bar:30} {percent:>3}% {msg}");
        let bar = terminal.then(|| {
            let bar = ProgressBar::new(total).with_prefix(task);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let begun = Instant::now();
        let next = begun + if bar.is_some() { BAR_EVERY } else { SILENCE };
        Progress {
            task,
            measure,
            bar,
            quiet,
            begun,
            next,
            total,
            files: 0,
            done: 0,
            text: 0,
            tokens: 0,
            documents: 0,
        }
    }

    /// Adds a document.
    pub(crate) fn document(&mut self, text_bytes: u64, tokens: u64) {
        self.text += text_bytes;
        self.tokens += tokens;
        self.documents += 1;
    }

    /// Adds a file of this size, or this amount of anything, without printing.
    pub fn file(&mut self, amount: u64) {
        self.files += amount;
        self.done = self.files;
    }

    /// Sets the amount read of the open file.
    pub(crate) fn within(&mut self, amount: u64) {
        self.done = self.files + amount;
    }

    /// Adds an amount, and prints if it is time.
    pub fn add(&mut self, amount: u64) {
        self.file(amount);
        self.tick();
    }

    /// Prints if it is time.
    pub fn tick(&mut self) {
        let now = Instant::now();
        if self.quiet || now < self.next {
            return;
        }
        self.next = now + if self.bar.is_some() { BAR_EVERY } else { LINE_EVERY };
        let line = self.line((now - self.begun).as_secs_f64());
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.done.min(self.total));
                bar.set_message(line);
            }
            None => note!("{}: {:.0}% of {line}", self.task, self.percent()),
        }
    }

    fn percent(&self) -> f64 {
        (100.0 * self.done as f64 / self.total.max(1) as f64).min(100.0)
    }

    fn line(&self, seconds: f64) -> String {
        let seconds = seconds.max(1e-3);
        let millions = |count: u64| count as f64 / 1e6;
        let mut line = vec![self.measure.amount(self.total)];
        if self.documents > 0 {
            line.push(counted(self.documents, "document"));
        }
        // A scan makes no tokens, and an import reads no text.
        if self.tokens > 0 {
            line.push(format!("{:.1} M tokens", millions(self.tokens)));
        }
        let mut rates = Vec::new();
        if self.text > 0 {
            rates.push(format!("{:.1} MB/s of text", millions(self.text) / seconds));
        }
        if self.tokens > 0 {
            rates.push(format!("{:.1} M tokens/s", millions(self.tokens) / seconds));
        }
        if rates.is_empty() {
            rates.push(self.measure.rate(self.done, seconds));
        }
        line.extend([rates.join(", "), self.left(seconds)]);
        line.join(" | ")
    }

    fn left(&self, seconds: f64) -> String {
        let (now, all) = (self.done, self.total);
        if now == 0 {
            return "time left unknown".to_owned();
        }
        let left = seconds * all.saturating_sub(now) as f64 / now as f64;
        format!("{} left", HumanDuration(Duration::from_secs_f64(left)))
    }

    /// The summary: counts and rates.
    pub(crate) fn finish(&mut self) -> String {
        self.clear();
        self.summary(self.begun.elapsed().as_secs_f64())
    }

    /// The summary of a store that was built, parts that existed before included.
    pub(crate) fn of(&mut self, store: &Manifest) -> String {
        let streams = store.sources.iter().flat_map(|source| [&source.train, &source.validation]);
        let sum = |of: fn(&StreamRecord) -> u64| streams.clone().map(of).sum();
        self.documents = sum(|stream| stream.documents);
        self.text = sum(|stream| stream.text_bytes);
        self.tokens = sum(|stream| stream.tokens);
        self.finish()
    }

    fn summary(&self, seconds: f64) -> String {
        let seconds = seconds.max(1e-3);
        let mut passed = vec![counted(self.documents, "document")];
        if self.text > 0 {
            passed.push(format!("{} of text", HumanBytes(self.text)));
        }
        if self.tokens > 0 {
            passed.push(counted(self.tokens, "token"));
        }
        let rate = match (self.text, self.tokens) {
            (0, 0) => String::new(),
            (0, tokens) => format!(" ({:.1} M tokens/s)", tokens as f64 / seconds / 1e6),
            (text, _) => format!(" ({:.1} MB/s)", text as f64 / seconds / 1e6),
        };
        format!("{} in {seconds:.1} s{rate}", passed.join(", "))
    }

    /// Runs `write` while the bar is hidden.
    pub fn aside<T>(&self, write: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// The next stage of the task, with its own unit and total.
    pub(crate) fn then(&mut self, measure: Measure, total: u64) -> Progress {
        self.clear();
        Progress::new(self.task, measure, total, self.quiet)
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Runs `work`, which may report more progress from any thread.
    pub fn during<T>(self, work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> T) -> T {
        let progress = Mutex::new(self);
        work(&|amount| {
            // A panic while reporting progress is reported itself, so a poisoned lock is ignored.
            if let Ok(mut progress) = progress.lock() {
                progress.add(amount);
            }
        })
    }
}

/// The progress of one part among others.
pub(crate) struct PartProgress<'a> {
    all: &'a Mutex<Progress>,
    /// The amount that was read of the open file.
    within: u64,
}

impl<'a> PartProgress<'a> {
    pub(crate) fn new(all: &'a Mutex<Progress>) -> Self {
        PartProgress { all, within: 0 }
    }

    /// Adds documents, their bytes and tokens, and sets the amount that was read of the open file.
    pub(crate) fn within(&mut self, amount: u64, documents: impl Iterator<Item = (u64, u64)>) {
        let passed = amount.saturating_sub(self.within);
        self.within = amount;
        self.pass(passed, documents);
    }

    /// Ends the open file, or adds this amount of anything.
    pub(crate) fn file(&mut self, amount: u64) {
        let passed = amount.saturating_sub(std::mem::take(&mut self.within));
        self.pass(passed, std::iter::empty());
    }

    fn pass(&self, amount: u64, documents: impl Iterator<Item = (u64, u64)>) {
        // A panic while reporting progress is reported itself, so a poisoned lock is ignored.
        if let Ok(mut all) = self.all.lock() {
            documents.for_each(|(text, tokens)| all.document(text, tokens));
            all.add(amount);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Runs `work` of unknown length, and reports from time to time that it is running: `task: what, 7 s so far`.
pub fn meanwhile<T>(task: &str, what: &str, work: impl FnOnce() -> T) -> T {
    let say = |passed: Duration| note!("{task}: {what}, {} s so far", passed.as_secs());
    beating([SILENCE, LINE_EVERY], say, work)
}

/// Runs `work` and calls `say` with the elapsed time: after the first of `waits`, then after the second, then at
/// growing intervals up to a minute, since some work takes days. If no thread can be started, nothing is printed.
fn beating<T>(
    [first, again]: [Duration; 2],
    say: impl Fn(Duration) + Send,
    work: impl FnOnce() -> T,
) -> T {
    let (done, end) = channel::<()>();
    thread::scope(|scope| {
        let begun = Instant::now();
        let beat = move || {
            let (mut wait, mut next) = (first, again);
            while end.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                say(begun.elapsed());
                (wait, next) = (next, next.mul_f64(1.5).min(SELDOM));
            }
        };
        let _ = thread::Builder::new().spawn_scoped(scope, beat);
        // Dropped when the work is done or panics: the scope then ends the reporting thread.
        let _done = done;
        work()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_line_tells_amount_rate_and_time_left() {
        let mut progress = Progress::new("verify", Measure::Bytes, 1 << 30, true);
        assert_eq!(progress.line(1.0), "1.00 GiB | 0 B/s | time left unknown");
        progress.add(1 << 28);
        assert_eq!(progress.line(2.0), "1.00 GiB | 128.00 MiB/s | 6 seconds left");
        assert_eq!(progress.percent(), 25.0);
        let mut progress = Progress::new("merge", Measure::Count("task"), 10, true);
        progress.add(5);
        assert_eq!(progress.line(10.0), "10 tasks | 0.5 tasks/s | 10 seconds left");
        progress.document(3_000_000, 1_000_000);
        let line = progress.line(1.0);
        assert!(line.contains("1 document | 1.0 M tokens | 3.0 MB/s of text"), "{line}");
        assert_eq!(
            progress.summary(1.0),
            "1 document, 2.86 MiB of text, 1000000 tokens in 1.0 s (3.0 MB/s)"
        );
    }

    #[test]
    fn nothing_is_said_of_what_is_not_counted() {
        let mut scan = Progress::new("dedup scan", Measure::Bytes, 10, true);
        scan.document(3_000_000, 0);
        scan.document(3_000_000, 0);
        assert_eq!(scan.line(2.0), "10 B | 2 documents | 3.0 MB/s of text | time left unknown");
        assert_eq!(scan.summary(2.0), "2 documents, 5.72 MiB of text in 2.0 s (3.0 MB/s)");
        let mut import = Progress::new("import", Measure::Bytes, 10, true);
        import.document(0, 4_000_000);
        let line = "10 B | 1 document | 4.0 M tokens | 2.0 M tokens/s | time left unknown";
        assert_eq!(import.line(2.0), line);
        assert_eq!(import.summary(2.0), "1 document, 4000000 tokens in 2.0 s (2.0 M tokens/s)");
    }

    #[test]
    fn what_takes_long_is_said_to_go_on_until_it_is_done() {
        let said = AtomicU64::new(0);
        let say = |_| {
            said.fetch_add(1, Ordering::Relaxed);
        };
        let long = Duration::from_millis(1);
        let count = beating([long, long], say, || {
            while said.load(Ordering::Relaxed) < 3 {
                thread::sleep(long);
            }
            7
        });
        assert_eq!(count, 7);
        let begun = Instant::now();
        beating([Duration::from_secs(60); 2], |_| panic!("it was done at once"), || ());
        assert!(begun.elapsed() < Duration::from_secs(30), "whoever is done waits for no beat");
    }
}
