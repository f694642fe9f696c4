//! Tensors that several threads read at once.

#![expect(unsafe_code, reason = "tch marks a tensor as Send but not Sync")]

use tch::Tensor;

/// Tensors that any number of threads read.
///
/// Their owner must not write their memory while threads read it, as with every alias of a tensor
/// (`Tensor::shallow_clone` is safe, and may be sent to another thread).
pub struct SharedTensors(Vec<Tensor>);

// SAFETY: the tensors are aliases without another owner, each with its own metadata. The only method with `&self`
// creates new aliases, which reads metadata and counts references to the storage atomically.
unsafe impl Sync for SharedTensors {}

impl SharedTensors {
    /// Aliases of `tensors` for reading by threads.
    pub fn new(tensors: &[Tensor]) -> Self {
        SharedTensors(tensors.iter().map(Tensor::detach).collect())
    }

    /// The calling thread's own aliases: shared storage, own metadata, no gradient history.
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
        let frozen = SharedTensors::new(&tensors);
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
