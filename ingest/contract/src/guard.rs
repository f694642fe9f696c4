//! Panics of libraries that read what nobody has vouched for.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is expected.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs what may panic, and gives what a panic said.
///
/// Decoders index into what a file says of itself, and a damaged one can make them panic. Whoever calls this has an
/// answer to that, so that what the panic would print could only mislead: on this thread, and as long as `work` runs,
/// nothing is printed. Every other panic speaks as before.
pub fn quietly<T>(work: impl FnOnce() -> T) -> std::result::Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let speak = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !EXPECTED.get() {
                speak(info);
            }
        }));
    });
    let before = EXPECTED.replace(true);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    EXPECTED.set(before);
    done.map_err(|panic| said(&*panic).to_owned())
}

/// What a panic said.
pub fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A variable that makes the test panic in a process of its own.
    const CHILD: &str = "CONTRACT_GUARD_CHILD";

    #[test]
    fn an_expected_panic_prints_nothing_and_says_what_it_was() {
        if std::env::var_os(CHILD).is_some() {
            assert_eq!(
                quietly(|| panic!("index {} of a file", 7)),
                Err::<(), _>("index 7 of a file".into())
            );
            assert_eq!(quietly(|| quietly(|| 1)), Ok(Ok(1)));
            let loud = std::thread::spawn(|| panic!("this one is told"));
            assert!(loud.join().is_err());
            return;
        }
        let name = "guard::tests::an_expected_panic_prints_nothing_and_says_what_it_was";
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.success(), "{told}");
        assert!(told.contains("this one is told") && !told.contains("of a file"), "{told}");
    }
}
