//! Turns errors of libtorch into faults of the machine.
//!
//! Errors are identified by their type, and out-of-memory by what the allocator refused. Where libtorch's wrapper
//! panics when out of memory, the panic is caught where the work began, so that the process ends cleanly. Any other
//! panic is a bug.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

use contract::fault::more_of;
use contract::{Fault, Result};
use kernels::{Error, want};
use tch::Tensor;
use tch::kind::Element;

/// Runs `work` and turns a panic into a fault, which is passed to the waiting caller.
pub fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(fault(&*panic)))
}

/// The values of a one-dimensional tensor.
pub(crate) fn values<T: Element + Copy>(tensor: &Tensor) -> Result<Vec<T>> {
    Vec::try_from(tensor).map_err(|error| match Error::from(error) {
        Error::Torch(error) => Fault::bug(format!("a tensor cannot be read: {error}")),
        other => refused(other),
    })
}

/// The fault if a rank cannot be reached: the machine is at fault, not the run.
pub fn lost(error: Error) -> Fault {
    let again =
        "run the same command again, with any number of ranks: it continues where it stopped";
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

/// The fault for a panic.
pub(crate) fn fault(panic: &(dyn Any + Send)) -> Fault {
    let message = text(panic).lines().next().unwrap_or_default();
    match want::was_refused() {
        true => no_memory(message),
        false => Fault::bug("a worker stopped").found(message),
    }
}

/// Turns an error of the kernels or of libtorch into a fault, for `map_err`.
pub fn refused(error: impl Into<Error>) -> Fault {
    let error = error.into();
    match &error {
        Error::NoMemory { reason, .. } => no_memory(reason),
        Error::Missing { .. }
        | Error::Short { .. }
        | Error::Reported { .. }
        | Error::Mistaken { .. }
        | Error::Stranger { .. } => lost(error),
        Error::Operand { .. } => Fault::bug(error.to_string()),
        other => not_computed(&other.to_string()),
    }
}

fn no_memory(message: &str) -> Fault {
    Fault::machine("there is not enough memory").found(message).hint(
        "use fewer workers or smaller micro-batches; the same command continues where it stopped",
    )
}

fn not_computed(message: &str) -> Fault {
    // libtorch's message ends with a stack trace.
    Fault::machine("libtorch could not compute this")
        .found(message.lines().next().unwrap_or(message))
        .hint("if it happens again at the same place it is a bug of ours: please report it with this message")
}

/// Silences the default message of panics that become such faults; other panics print as before. Called once, when a
/// program starts.
pub fn print_panics_once() {
    let print_default = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !want::is_refused() {
            print_default(info);
        }
    }));
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
        let fault = caught(|| a.f_add(&b).map_err(refused)).map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Machine);
        let told = fault.to_string();
        assert!(told.contains("The size of tensor a (2) must match"), "{told}");
        assert!(!told.contains("Exception raised") && !told.contains("unwrap"), "{told}");
        let fault = caught(|| Ok(&a + &b)).map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Bug, "a call that cannot say that it failed");
    }

    #[test]
    fn want_of_memory_says_so() {
        let petabyte = 1i64 << 50;
        let panics = || Ok(Tensor::empty([petabyte], tch::kind::FLOAT_CPU));
        let says = || Tensor::f_empty([petabyte], tch::kind::FLOAT_CPU).map_err(refused);
        for fault in [caught(panics), caught(says)] {
            let fault = fault.map(|_| ()).unwrap_err();
            assert_eq!(fault.class(), Class::Machine);
            assert!(fault.to_string().contains("not enough memory"), "{fault}");
        }
        let fault = caught::<()>(|| panic!("afterwards")).unwrap_err();
        assert_eq!(fault.class(), Class::Bug, "nothing stays behind");
    }

    #[test]
    fn an_error_of_the_kernels_is_known_by_its_type() {
        let (call, reason) = ("a test", "nothing left".to_owned());
        let fault = refused(Error::NoMemory { call, reason: reason.clone() });
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
        let fault = caught::<()>(|| panic!("micro-batch {} broke", 3)).unwrap_err();
        assert_eq!(fault.class(), Class::Bug);
        assert!(fault.to_string().contains("micro-batch 3 broke"), "{fault}");
    }
}
