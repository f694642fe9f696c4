//! How far a build is: a bar on a terminal, a plain line every few seconds elsewhere, always on standard error.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Time between two looks of the bar.
const BAR_EVERY: Duration = Duration::from_millis(100);

/// Counts what passes and tells it. The clock here decides nothing but when to speak.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    begun: Instant,
    told: Instant,
    input_bytes: u64,
    before: u64,
    /// Bytes of the files that are finished.
    files: u64,
    /// The same, and what was read of the open one.
    done: u64,
    text: u64,
    tokens: u64,
    documents: u64,
}

impl Progress {
    /// For inputs of `input_bytes` together, of which `done` were read by an earlier, killed build.
    pub(crate) fn new(input_bytes: u64, done: u64, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal() && !quiet;
        let style = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}");
        let bar = terminal.then(|| {
            let bar = ProgressBar::new(input_bytes);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let now = Instant::now();
        Progress {
            bar,
            quiet,
            begun: now,
            told: now,
            input_bytes,
            before: done,
            files: done,
            done,
            text: 0,
            tokens: 0,
            documents: 0,
        }
    }

    /// One more document.
    pub(crate) fn document(&mut self, text_bytes: u64, tokens: u64) {
        self.text += text_bytes;
        self.tokens += tokens;
        self.documents += 1;
    }

    /// One more file of this size.
    pub(crate) fn file(&mut self, bytes: u64) {
        self.files += bytes;
        self.done = self.files;
    }

    /// So much of the open file is read.
    pub(crate) fn within(&mut self, bytes: u64) {
        self.done = self.files + bytes;
    }

    /// Speaks, if it is time.
    pub(crate) fn tick(&mut self) {
        let every = if self.bar.is_some() { BAR_EVERY } else { LINE_EVERY };
        if self.quiet || self.told.elapsed() < every {
            return;
        }
        self.told = Instant::now();
        let line = self.line();
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.done.min(self.input_bytes));
                bar.set_message(line);
            }
            None => eprintln!("{line}"),
        }
    }

    fn line(&self) -> String {
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-3);
        let rate = |count: u64| count as f64 / seconds / 1e6;
        let share = 100.0 * self.done as f64 / self.input_bytes.max(1) as f64;
        format!(
            "{share:.0}% of {} | {} documents | {:.1} M tokens | {:.1} MB/s of text, {:.1} M tokens/s | {}",
            HumanBytes(self.input_bytes),
            self.documents,
            self.tokens as f64 / 1e6,
            rate(self.text),
            rate(self.tokens),
            self.left(seconds),
        )
    }

    fn left(&self, seconds: f64) -> String {
        let (now, all) = (self.done - self.before, self.input_bytes.saturating_sub(self.before));
        if now == 0 {
            return "time left unknown".to_owned();
        }
        let left = seconds * all.saturating_sub(now) as f64 / now as f64;
        format!("{} left", HumanDuration(Duration::from_secs_f64(left)))
    }

    /// The last word: what passed and how fast.
    pub(crate) fn finish(&mut self) -> String {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-3);
        format!(
            "{} documents, {} of text, {} tokens in {seconds:.1} s ({:.1} MB/s)",
            self.documents,
            HumanBytes(self.text),
            self.tokens,
            self.text as f64 / seconds / 1e6,
        )
    }
}
