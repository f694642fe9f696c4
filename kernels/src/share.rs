//! Tensors that several threads read at once.

#![expect(unsafe_code, reason = "tch marks a tensor as Send but not Sync")]

use tch::Tensor;

/// Tensors that may be read from any number of threads, and are written by none while this value lives.
#[derive(Clone, Copy)]
pub struct Frozen<'a>(&'a [Tensor]);

// SAFETY: the only method makes a new alias of each tensor. libtorch counts references to a storage atomically, and
// making an alias reads the tensor's metadata without writing it; the borrow keeps every `&mut` away meanwhile.
unsafe impl Sync for Frozen<'_> {}
// SAFETY: as above.
unsafe impl Send for Frozen<'_> {}

impl<'a> Frozen<'a> {
    /// Freezes `tensors` for as long as they are borrowed.
    pub fn new(tensors: &'a [Tensor]) -> Self {
        Frozen(tensors)
    }

    /// The calling thread's own aliases: same storage, own metadata, no gradient history.
    pub fn aliases(&self) -> Vec<Tensor> {
        self.0.iter().map(Tensor::detach).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_see_one_storage() {
        let tensors = [Tensor::from_slice(&[1.0f32, 2.0]), Tensor::from_slice(&[3.0f32])];
        let frozen = Frozen::new(&tensors);
        let place = tensors[0].data_ptr() as usize;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let own = frozen.aliases();
                    assert_eq!(own[0].data_ptr() as usize, place);
                    let _ = own[0].set_requires_grad(true);
                });
            }
        });
        assert!(!tensors[0].requires_grad());
    }
}
