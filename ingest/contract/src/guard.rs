//! Panics of libraries that read untrusted data.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is expected.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, which may panic, and returns the panic's message.
///
/// Decoders use a file's own numbers as indices, so a damaged file can make them panic. The caller handles that, and
/// the panic's message would only mislead: nothing is printed for panics of this thread while `work` runs. All other
/// panics are printed as before.
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

/// The message of a panic.
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
