//! Peak FLOP/s of devices by their datasheets, the base of MFU.

use curriculum::Dtype;

/// Dense TFLOP/s, without sparsity: bf16 by matrix units, f32 by vector units. The f32 here never uses TF32, whose bits
/// differ.
const PEAKS: [(&str, [f64; 2]); 9] = [
    ("A100", [312.0, 19.5]),
    ("B200", [2250.0, 80.0]),
    ("GH200", [989.4, 66.9]),
    ("H100 PCIe", [756.0, 51.2]),
    ("H100", [989.4, 66.9]),
    ("H200", [989.4, 66.9]),
    ("MI250X", [383.0, 47.9]),
    ("MI300X", [1307.4, 163.4]),
    ("MI325X", [1307.4, 163.4]),
];

/// Peak FLOP/s of the device with this `name`; `None` if it is unknown.
pub(super) fn of(name: &str, dtype: Dtype) -> Option<f64> {
    let (_, [bf16, f32]) = PEAKS.iter().find(|(known, _)| name.contains(known))?;
    Some(1e12 * if dtype == Dtype::Bf16 { bf16 } else { f32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_what_drivers_call_them() {
        let bf16 = |name| of(name, Dtype::Bf16);
        assert_eq!(bf16("NVIDIA H100 80GB HBM3"), Some(989.4e12));
        assert_eq!(bf16("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(bf16("NVIDIA GH200 480GB"), Some(989.4e12));
        assert_eq!(of("AMD Instinct MI300X", Dtype::F32), Some(163.4e12));
        assert_eq!(bf16("AMD EPYC 7763"), None);
    }
}
