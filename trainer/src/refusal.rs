//! What libtorch refuses, as a fault of the machine.
//!
//! libtorch's wrapper panics where libtorch throws: for want of memory, or because a device or a kernel gave up. Such a
//! panic is caught where the work began, so that a person reads which step and leaf it was and what libtorch said, and
//! the process ends in order. Any other panic is a bug of ours.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

use contract::fault::more_of;
use contract::{Fault, Result};
use kernels::Error;
use tch::Tensor;
use tch::kind::Element;

/// How the panic of tch, libtorch's wrapper, begins when libtorch threw: it hands on nothing but these words.
const THROWN: &str = "called `Result::unwrap()` on an `Err` value: Torch(\"";

/// Runs `work`; a panic becomes a fault, so that whoever waits for it learns of it.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(fault(&*panic)))
}

/// The numbers of a tensor that has one dimension.
pub(crate) fn values<T: Element + Copy>(tensor: &Tensor) -> Result<Vec<T>> {
    Vec::try_from(tensor).map_err(|error| Fault::bug(format!("a tensor cannot be read: {error}")))
}

/// A rank that cannot be reached is the machine's fault; the run itself is well.
pub fn lost(error: Error) -> Fault {
    let again =
        "run the same command again, with as many ranks as you like: it goes on where it stopped";
    match error {
        Error::Missing { what } => Fault::machine(what).hint(again),
        Error::Mistaken { what } => Fault::usage(what),
        Error::Stranger { what } => Fault::usage(what).hint(
            "give every rank of a run the same ZTRAIN_RUN_KEY or ZTRAIN_RUN_KEY_FILE, and no other run its port",
        ),
        Error::Short { call, error } => {
            Fault::machine(format!("{call}: {error}")).hint(more_of(&error))
        }
        Error::Reported { what } => {
            Fault::machine("another rank stopped the run").found(what).hint(again)
        }
        other => Fault::machine(other.to_string()),
    }
}

/// What to say about a panic.
pub(crate) fn fault(panic: &(dyn Any + Send)) -> Fault {
    let text = text(panic);
    let Some(said) = thrown(text) else {
        return Fault::bug("a worker stopped").found(text.lines().next().unwrap_or(text));
    };
    said_by_libtorch(said)
}

/// An error of the kernels, or of libtorch under them, as a fault, for `map_err`.
pub(crate) fn refused(error: impl Into<Error>) -> Fault {
    let error = error.into();
    match &error {
        Error::NoMemory { reason, .. } => no_memory(reason),
        Error::Missing { .. }
        | Error::Short { .. }
        | Error::Reported { .. }
        | Error::Mistaken { .. }
        | Error::Stranger { .. } => lost(error),
        Error::Operand { .. } => Fault::bug(error.to_string()),
        Error::Torch(error) => said_by_libtorch(&error.to_string()),
        other => said_by_libtorch(&other.to_string()),
    }
}

/// What says that memory is wanting: libtorch's CPU allocator throws what it throws for everything; and oneDNN, which is
/// asked for nothing that it does not know, cannot make a product where it gets no memory for its code.
const WANTING: [&str; 4] = [
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "could not create a primitive",
];

fn said_by_libtorch(said: &str) -> Fault {
    let said = said.lines().next().unwrap_or(said);
    match WANTING.iter().any(|words| said.contains(words)) {
        true => no_memory(said),
        false => not_computed(said),
    }
}

fn no_memory(said: &str) -> Fault {
    Fault::machine("there is not enough memory").found(said).hint(
        "use fewer workers or smaller micro-batches; the same command goes on where it stopped",
    )
}

fn not_computed(said: &str) -> Fault {
    Fault::machine("libtorch could not compute this")
        .found(said)
        .hint("if it happens again at the same place it is a bug of ours: please report it with this message")
}

/// Keeps the panics that become such faults from writing a message of their own. Called once, at the start of a
/// program; every other panic speaks as before.
pub fn speak_once() {
    let speak = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if thrown(info.payload_as_str().unwrap_or_default()).is_none() {
            speak(info);
        }
    }));
}

/// What libtorch said, if it was libtorch. Its messages end in a stack trace of its own: the first line says what
/// happened, and the wrapper shows line ends as `\n`.
fn thrown(text: &str) -> Option<&str> {
    let said = text.strip_prefix(THROWN)?;
    let said = said.split("\\n").next().unwrap_or(said);
    Some(said.strip_suffix("\")").unwrap_or(said))
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::Class;

    #[test]
    fn what_libtorch_throws_is_the_machines_in_its_own_words() {
        let (a, b) = (Tensor::from_slice(&[1f32, 2.0]), Tensor::from_slice(&[1f32, 2.0, 3.0]));
        let fault = caught(|| Ok(&a + &b)).map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        let told = fault.to_string();
        assert!(told.contains("The size of tensor a (2) must match"), "{told}");
        assert!(!told.contains("Exception raised") && !told.contains("unwrap"), "{told}");
    }

    #[test]
    fn want_of_memory_says_so() {
        let petabyte = 1i64 << 50;
        let fault = caught(|| Ok(Tensor::empty([petabyte], tch::kind::FLOAT_CPU)));
        let fault = fault.map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        assert!(fault.to_string().contains("not enough memory"), "{fault}");
    }

    #[test]
    fn an_error_of_the_kernels_is_known_by_its_type() {
        let (call, reason) = ("a test", "nothing left".to_owned());
        let fault = refused(Error::NoMemory { call, reason: reason.clone() });
        assert!(fault.to_string().contains("not enough memory"), "{fault}");
        let wanting = "could not create a primitive".to_owned();
        let fault = refused(Error::Foreign { call, reason: wanting });
        assert!(fault.to_string().contains("not enough memory"), "{fault}");
        let fault = refused(Error::Foreign { call, reason });
        assert_eq!(fault.class(), Class::Machine);
        assert!(fault.to_string().contains("could not compute"), "{fault}");
        let (operation, operand) = ("a test", "a number");
        let [found, wanted] = ["seven", "six"].map(str::to_owned);
        let fault = refused(Error::Operand { operation, operand, found, wanted });
        assert_eq!(fault.class(), Class::Bug);
        assert!(fault.to_string().contains("a number is seven, wanted six"), "{fault}");
    }

    #[test]
    fn what_fails_again_is_not_to_be_tried_again() {
        let (what, again) = ("two processes are rank 1".to_owned(), "run the same command again");
        let fault = lost(Error::Mistaken { what: what.clone() });
        assert_eq!(fault.class(), Class::Usage);
        assert!(!fault.to_string().contains(again), "{fault}");
        assert!(lost(Error::Missing { what }).to_string().contains(again));
    }

    #[test]
    fn any_other_panic_is_a_bug() {
        let fault = caught::<()>(|| panic!("leaf {} broke", 3)).unwrap_err();
        assert_eq!(fault.class(), Class::Bug);
        assert!(fault.to_string().contains("leaf 3 broke"), "{fault}");
    }
}
