//! The operands of a measurement.

use kernels::Result as Computed;
use tch::{Device, Kind, Tensor};

/// Numbers between -1 and 1, unrelated between neighbours.
pub(crate) fn numbers(shape: &[i64], by: f64, kind: Kind, device: Device) -> Computed<Tensor> {
    let count: i64 = shape.iter().product();
    let flat = Tensor::f_arange(count, (Kind::Float, device))?.f_mul_scalar(by * 1e3)?;
    Ok(flat.f_sin()?.f_reshape(shape)?.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn operands_have_no_structure() {
        let of = |by| numbers(&[64, 64], by, Kind::Float, Device::Cpu).unwrap();
        let values = Vec::<f32>::try_from(&of(0.7).reshape([-1])).unwrap();
        let mantissas: BTreeSet<u32> = values.iter().map(|value| value.to_bits() >> 8).collect();
        assert!(mantissas.len() > 3900, "{} of {}", mantissas.len(), values.len());
        assert!((of(0.7) - of(0.9)).abs().max().double_value(&[]) > 1.0);
        assert!(of(0.7).mean(Kind::Float).double_value(&[]).abs() < 0.05);
    }
}
