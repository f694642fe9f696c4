//! What stands around attention: convolution, means, length, rotation, the value shift.

use tch::Tensor;

use super::rows::banded;
use super::tape::{Argument, Buffer, Tape};
use super::{Values, bits_of, left_bits, numbers, tensor};
use crate::ops::{CPU, DepthwiseConv, QueryKey};

/// Rows at which documents begin: the first, and every one that two small numbers meet in.
fn starts(rows: usize) -> Vec<i64> {
    (0..rows as i64).filter(|row| row % 7 == 0 || row % 11 == 10).collect()
}

/// A list of rows, as kernels take it.
fn listed(tape: &mut Tape, rows: &[i64]) -> [Argument; 2] {
    [tape.with(rows).into(), rows.len().into()]
}

struct Conv {
    tape: Tape,
    both: Buffer,
    input: Buffer,
    sums: Buffer,
}

fn conv([rows, heads, width]: [usize; 3], values: Values, counted: Option<&[i64]>) -> Conv {
    let (channels, kind) = (heads * width, values.kind());
    let mut tape = Tape::new(&format!("depthwise_conv_{kind}"));
    let z = values.with(&mut tape, rows * channels, 1);
    let grad = values.with(&mut tape, 2 * rows * channels, 2);
    let (taps, bias) = (tape.with(&numbers(2 * channels, 3)), tape.with(&numbers(channels, 4)));
    let begins = listed(&mut tape, &starts(rows));
    let none = [Argument::Null, Argument::Word(u32::MAX)];
    let counts = counted.map_or(none, |counted| listed(&mut tape, counted));
    let both = values.room(&mut tape, 2 * rows * channels);
    let sizes = [rows, width, channels].map(Argument::from);
    let blocks = (rows * channels).div_ceil(1024);
    let places = [z, taps, bias].map(Argument::from);
    let arguments = [&places[..], &begins, &[both.into()], &sizes].concat();
    tape.launch(&format!("depthwise_conv_{kind}"), blocks, &arguments);
    let input = tape.room::<f32>(rows * channels);
    let sums = banded(&mut tape, [3, rows, channels], |tape, partial, blocks| {
        let lists = [&[z.into(), taps.into()][..], &begins, &counts].concat();
        let arguments = [&lists[..], &[grad, input, partial].map(Argument::from), &sizes].concat();
        tape.launch(&format!("depthwise_conv_backward_{kind}"), blocks, &arguments);
    });
    Conv { tape, both, input, sums }
}

#[test]
fn convolutions_are_those_of_the_cpu() {
    let some: Vec<i64> = (0..70).filter(|row| row % 3 > 0).collect();
    let cases = [
        ([1, 1, 1], Values::Wide, None),
        ([70, 3, 13], Values::Wide, None),
        ([70, 2, 9], Values::Narrow, None),
        ([33, 2, 140], Values::Narrow, None),
        ([70, 2, 5], Values::Wide, Some(some)),
    ];
    for (shape, values, counted) in cases {
        let conv = conv(shape, values, counted.as_deref());
        let played = conv.tape.play();
        let [rows, heads, width] = shape.map(|size| size as i64);
        let channels = heads * width;
        let z = values.tensor(&[rows, channels], 1);
        let grad = values.tensor(&[heads, rows, 2 * width], 2);
        let weights = tensor(&numbers(2 * channels as usize, 3), &[channels, 1, 2]);
        let bias = tensor(&numbers(channels as usize, 4), &[channels]);
        let starts = Tensor::from_slice(&starts(rows as usize));
        let counts = counted.as_deref().map(Tensor::from_slice);
        let by = DepthwiseConv {
            weights: &weights,
            bias: &bias,
            starts: &starts,
            counted: counts.as_ref(),
            heads: [heads, width],
        };
        let both = values.read(&played, conv.both, &[heads, rows, 2 * width]);
        assert_eq!(both, CPU.depthwise_conv(&z, by).unwrap());
        let wanted = CPU.depthwise_conv_backward(&z, by, &grad).unwrap();
        assert_eq!(left_bits(&played, conv.input), bits_of(&wanted.input));
        let taps = wanted.weights.reshape([channels, 2]).tr().contiguous();
        let found = tensor(&played.read(conv.sums), &[3, channels]);
        let wanted = Tensor::cat(&[taps, wanted.bias.unsqueeze(0)], 0);
        match counts {
            None => assert_eq!(bits_of(&found), bits_of(&wanted)),
            // Bands are of all rows here, of those that count there.
            Some(_) => assert!((found - wanted).abs().max().double_value(&[]) < 1e-5),
        }
    }
}

struct Turned {
    tape: Tape,
    raw: Buffer,
    forward: [Buffer; 2],
    grad: Buffer,
    sums: [Buffer; 2],
    z: Buffer,
}

/// Tokens, query heads, key heads, dimensions, dimensions that are turned.
fn turned([tokens, queries, keys, width, half]: [usize; 5], values: Values) -> Turned {
    let (heads, kind) = (queries + keys, values.kind());
    let count = heads * tokens * width;
    let mut tape = Tape::new(&format!("query_key_{kind}"));
    let z = values.with(&mut tape, count, 1);
    let [raw, grad, to_z] = [2, 3, 4].map(|seed| tape.with(&numbers(count, seed)));
    let (bias, temperature) = (tape.with(&numbers(heads * width, 5)), tape.with(&numbers(keys, 6)));
    let [cosines, sines] = [7, 8].map(|seed| tape.with(&numbers(tokens * half, seed)));
    let sizes = [tokens, queries, keys, width].map(Argument::from);
    let (elements, rows) = ((tokens * keys * width).div_ceil(1024), (heads * tokens).div_ceil(16));
    let (factors, out) = (tape.room::<f32>(heads * tokens), tape.room::<f32>(count));
    let turns = [&sizes[..], &[half.into()]].concat();
    let places = [z, bias, raw, temperature, cosines, sines, factors, out].map(Argument::from);
    tape.launch(&format!("query_key_{kind}"), rows, &[&places[..], &turns].concat());
    let shares = tape.room::<f32>(heads * tokens);
    let places = [raw, factors, temperature, cosines, sines, grad, shares].map(Argument::from);
    tape.launch("query_key_backward", rows, &[&places[..], &turns].concat());
    let temperatures = tape.room::<f32>(heads);
    let arguments: [Argument; 4] =
        [shares.into(), temperatures.into(), heads.into(), tokens.into()];
    tape.launch("head_sums", heads.div_ceil(256), &arguments);
    let biases = banded(&mut tape, [heads, tokens, width], |tape, partial, blocks| {
        let arguments: [Argument; 4] = [grad.into(), partial.into(), tokens.into(), width.into()];
        tape.launch("column_sums", heads * blocks, &arguments);
    });
    let arguments = [&[raw.into(), to_z.into()][..], &sizes].concat();
    tape.launch("means_backward", elements, &arguments);
    Turned { tape, raw, forward: [factors, out], grad, sums: [temperatures, biases], z: to_z }
}

#[test]
fn queries_and_keys_are_those_of_the_cpu() {
    let cases = [
        ([1, 1, 1, 2, 1], Values::Wide),
        ([40, 6, 2, 24, 8], Values::Wide),
        ([33, 4, 4, 37, 5], Values::Narrow),
        ([35, 3, 1, 66, 33], Values::Narrow),
    ];
    for (shape, values) in cases {
        let turned = turned(shape, values);
        let played = turned.tape.play();
        let [tokens, queries, keys, width, half] = shape.map(|size| size as i64);
        let heads = queries + keys;
        let by_head = [heads, tokens, width];
        let of = |seed, shape: &[i64]| {
            tensor(&numbers(shape.iter().product::<i64>() as usize, seed), shape)
        };
        let z = values.tensor(&[tokens, heads * width], 1);
        let (mut raw, grad) = (of(2, &by_head), of(3, &by_head));
        let (bias, temperature) = (of(5, &[heads * width]), of(6, &[keys]));
        let (cosines, sines) = (of(7, &[tokens, half]), of(8, &[tokens, half]));
        let by = QueryKey {
            bias: &bias,
            temperature: &temperature,
            angles: [&cosines, &sines],
            shape: [queries, keys, width],
        };
        let (out, factors) = CPU.query_key(&z, &mut raw, by).unwrap();
        assert_eq!(left_bits(&played, turned.raw), bits_of(&raw));
        assert_eq!(left_bits(&played, turned.forward[0]), bits_of(&factors));
        assert_eq!(left_bits(&played, turned.forward[1]), bits_of(&out));
        let wanted = CPU.query_key_backward(&raw, &factors, by, grad).unwrap();
        assert_eq!(left_bits(&played, turned.grad), bits_of(&wanted.raw));
        let temperatures = left_bits(&played, turned.sums[0]);
        assert_eq!(temperatures[queries as usize..], bits_of(&wanted.temperature));
        assert_eq!(left_bits(&played, turned.sums[1]), bits_of(&wanted.bias));
        let mut to_z = of(4, &[tokens, heads * width]);
        CPU.means_backward(&raw, by.shape, &mut to_z).unwrap();
        assert_eq!(left_bits(&played, turned.z), bits_of(&to_z));
    }
}

fn shift([rows, left, right]: [usize; 3], values: Values) -> (Tape, Buffer, Buffer) {
    let kind = values.kind();
    let mut tape = Tape::new(&format!("value_shift_{kind}"));
    let current = values.with(&mut tape, rows * left, 1);
    let delayed = values.with(&mut tape, rows * right, 2);
    let grad = values.with(&mut tape, rows * (left + right), 3);
    let begins = listed(&mut tape, &starts(rows));
    let [out, back] = [(); 2].map(|()| values.room(&mut tape, rows * (left + right)));
    let (sizes, blocks) =
        ([rows, left, right].map(Argument::from), (rows * (left + right)).div_ceil(1024));
    let places = [current, delayed].map(Argument::from);
    let arguments = [&places[..], &begins, &[out.into()], &sizes].concat();
    tape.launch(&format!("value_shift_{kind}"), blocks, &arguments);
    let arguments = [&[grad.into()][..], &begins, &[back.into()], &sizes].concat();
    tape.launch(&format!("value_shift_backward_{kind}"), blocks, &arguments);
    (tape, out, back)
}

#[test]
fn values_shift_as_on_the_cpu() {
    for (shape, values) in
        [([1, 1, 1], Values::Wide), ([50, 33, 7], Values::Wide), ([40, 5, 60], Values::Narrow)]
    {
        let (tape, out, back) = shift(shape, values);
        let played = tape.play();
        let [rows, left, right] = shape.map(|size| size as i64);
        let both = [rows, left + right];
        let [current, delayed] =
            [(left, 1), (right, 2)].map(|(width, seed)| values.tensor(&[rows, width], seed));
        let starts = Tensor::from_slice(&starts(shape[0]));
        let wanted = CPU.value_shift(&current, &delayed, &starts).unwrap();
        assert_eq!(values.read(&played, out, &both), wanted);
        let wanted = CPU.value_shift_backward(values.tensor(&both, 3), left, &starts).unwrap();
        assert_eq!(values.read(&played, back, &both), wanted);
    }
}

pub(super) fn small() -> Vec<Tape> {
    [Values::Wide, Values::Narrow]
        .into_iter()
        .flat_map(|values| {
            let some = [1, 2, 5, 33];
            [
                conv([35, 2, 5], values, Some(&some)).tape,
                turned([9, 4, 2, 20, 7], values).tape,
                shift([20, 9, 4], values).0,
            ]
        })
        .collect()
}
