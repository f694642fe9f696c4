//! The parts around attention: convolution and value shift, means, norms, rotary embedding.

use tch::{Kind, Tensor};

use super::finish::{Unfinished, finish};
use super::rows::made;
use super::tape::{Argument, Buffer, Tape};
use super::{Values, bits_of, left_bits, numbers, tensor};
use crate::ops::{CPU, ConvShift, HeadGrads, QueriesAndKeys, QueryKey};

/// First rows of documents: row 0 and others at irregular distances.
fn starts(rows: usize) -> Vec<i64> {
    (0..rows as i64).filter(|row| row % 7 == 0 || row % 11 == 10).collect()
}

/// A list of rows as a pair of kernel arguments.
fn listed(tape: &mut Tape, rows: &[i64]) -> [Argument; 2] {
    [tape.with(rows).into(), rows.len().into()]
}

struct Conv {
    tape: Tape,
    out: [Buffer; 2],
    input: Buffer,
    /// Gradients of the depthwise weights and of the bias.
    sums: [Buffer; 2],
}

/// Rows, heads, their width, values that are not shifted and values that are.
type Shape = [usize; 5];

fn conv(shape: Shape, values: Values, counted: Option<&[i64]>) -> Conv {
    let [rows, heads, width, stay, go] = shape;
    let (channels, kind) = (heads * width, values.kind());
    let columns = channels + stay + go;
    let mut tape = Tape::new(&format!("conv_shift_{kind}"));
    let z = values.with(&mut tape, rows * columns, 1);
    let grad = values.with(&mut tape, 2 * rows * channels, 2);
    let (taps, bias) = (tape.with(&numbers(2 * channels, 3)), tape.with(&numbers(channels, 4)));
    let to_values = values.with(&mut tape, rows * (stay + go), 5);
    let means = tape.with(&numbers(counted.map_or(rows, <[i64]>::len) * channels, 6));
    let begins = listed(&mut tape, &starts(rows));
    let none = [Argument::Null, Argument::Word(u32::MAX)];
    let counts = counted.map_or(none, |counted| listed(&mut tape, counted));
    let both = values.room(&mut tape, 2 * rows * channels);
    let shifted = values.room(&mut tape, rows * (stay + go));
    let sizes = [rows, width, channels, channels + stay, columns].map(Argument::from);
    let places = [z, taps, bias].map(Argument::from);
    let out = [both, shifted];
    let arguments = [&places[..], &begins, &out.map(Argument::from), &sizes].concat();
    let blocks = |groups: usize| (columns.div_ceil(4) * groups).div_ceil(256);
    tape.launch(&format!("conv_shift_{kind}"), blocks(rows.div_ceil(8)), &arguments);
    let input = values.room(&mut tape, rows * columns);
    let bands = rows.div_ceil(32);
    let partial = tape.room::<f32>(3 * bands * channels);
    let lists = [&[z.into(), taps.into()][..], &begins, &counts].concat();
    let rest = [grad, to_values, means, input, partial].map(Argument::from);
    let arguments = [&lists[..], &rest, &sizes].concat();
    let name = format!("conv_shift_backward_{kind}");
    tape.launch(&name, blocks(bands), &arguments);
    let sums = [2, 1].map(|each| tape.room::<f32>(each * channels));
    let sum = |which, out, stride| {
        let partial = (partial, which * bands * channels);
        Unfinished { partial, other: None, factor: None, out, stride }
    };
    let all = [sum(0, (sums[0], 0), 2), sum(1, (sums[0], 1), 2), sum(2, (sums[1], 0), 1)];
    finish(&mut tape, [rows, channels], &all);
    Conv { tape, out, input, sums }
}

#[test]
fn convolutions_and_shifts_are_those_of_the_cpu() {
    let some: Vec<i64> = (0..70).filter(|row| row % 3 > 0).collect();
    let cases = [
        ([1, 1, 1, 1, 1], Values::Wide, None),
        ([70, 3, 13, 5, 0], Values::Wide, None),
        ([70, 2, 9, 33, 7], Values::Narrow, None),
        ([33, 2, 140, 0, 60], Values::Narrow, None),
        ([70, 2, 5, 3, 4], Values::Wide, Some(some.clone())),
        // Columns are read four at a time.
        ([70, 2, 12, 8, 4], Values::Narrow, None),
        ([66, 3, 4, 0, 8], Values::Wide, None),
        ([70, 1, 8, 4, 0], Values::Narrow, Some(some)),
    ];
    for (shape, values, counted) in cases {
        let conv = conv(shape, values, counted.as_deref());
        let played = conv.tape.play();
        let [rows, heads, width, stay, go] = shape.map(|size| size as i64);
        let (channels, shifted) = (heads * width, stay + go);
        let columns = channels + shifted;
        let z = values.tensor(&[rows, columns], 1);
        let grad = values.tensor(&[heads, rows, 2 * width], 2);
        let to_values = values.tensor(&[rows, shifted], 5);
        let of = |shape: &[i64], seed| {
            tensor(&numbers(shape.iter().product::<i64>() as usize, seed), shape)
        };
        let (weights, bias) = (of(&[channels, 1, 2], 3), of(&[channels], 4));
        let starts = Tensor::from_slice(&starts(rows as usize));
        let counts = counted.as_deref().map(Tensor::from_slice);
        let means = of(&[counts.as_ref().map_or(rows, |rows| rows.size()[0]), channels], 6);
        let by = ConvShift {
            weights: &weights,
            bias: &bias,
            starts: &starts,
            counted: counts.as_ref(),
            heads: [heads, width],
            values: [stay, go],
        };
        let [both, value] = CPU.conv_shift(&z, by).unwrap();
        assert_eq!(values.read(&played, conv.out[0], &[heads, rows, 2 * width]), both);
        assert_eq!(values.read(&played, conv.out[1], &[rows, shifted]), value);
        let wanted = CPU.conv_shift_backward(&z, by, [&grad, &to_values], &means).unwrap();
        assert_eq!(values.read(&played, conv.input, &[rows, columns]), wanted.input);
        for (found, wanted) in conv.sums.into_iter().zip([wanted.weights, wanted.bias]) {
            let wanted = made(wanted);
            match counts {
                None => assert_eq!(left_bits(&played, found), bits_of(&wanted)),
                // This side sums bands of all rows, the other of the counted rows only.
                Some(_) => {
                    let found = tensor(&played.read(found), &wanted.size());
                    assert!((found - wanted).abs().max().double_value(&[]) < 1e-5);
                }
            }
        }
    }
}

struct Rotated {
    tape: Tape,
    /// In bf16 if the values are bf16.
    rounded: Option<Buffer>,
    raw: Buffer,
    forward: [Buffer; 2],
    grad: Buffer,
    means: Buffer,
    sums: [Buffer; 2],
}

/// Tokens, query heads, key heads, dimensions, rotated dimensions. Three other columns follow the queries and keys.
/// With `apart` the gradients of both are given in bf16.
fn turned(
    [tokens, queries, keys, width, half]: [usize; 5],
    values: Values,
    apart: bool,
) -> Rotated {
    let (heads, kind) = (queries + keys, values.kind());
    let count = heads * tokens * width;
    let mut tape = Tape::new(&format!("query_key_{kind}"));
    let z = values.with(&mut tape, tokens * (heads * width + 3), 1);
    let (grad, given) = match apart {
        true => {
            let given = [(queries, 3), (keys, 4)].map(|(heads, seed)| {
                Values::Narrow.with(&mut tape, heads * tokens * width, seed).into()
            });
            (tape.room::<f32>(count), given)
        }
        false => (tape.with(&numbers(count, 3)), [Argument::Null; 2]),
    };
    let made = values.with(&mut tape, count, 2);
    let raw = if values == Values::Wide { made } else { tape.room::<f32>(count) };
    let (bias, temperature) = (tape.with(&numbers(heads * width, 5)), tape.with(&numbers(keys, 6)));
    let [cosines, sines] = [7, 8].map(|seed| tape.with(&numbers(tokens * half, seed)));
    let sizes = [tokens, queries, keys, width, half].map(Argument::from);
    let (factors, out) = (tape.room::<f32>(heads * tokens), values.room(&mut tape, count));
    let places = [z, made, bias, raw, temperature, cosines, sines, factors, out];
    let places = places.map(Argument::from);
    let arguments = [&places[..], &sizes, &[(heads * width + 3).into()]].concat();
    tape.launch(&format!("query_key_{kind}"), (heads * tokens).div_ceil(16), &arguments);
    let (means, bands) = (tape.room::<f32>(count), tokens.div_ceil(32));
    let widths = [heads * width, keys];
    let partial = widths.map(|width| tape.room::<f32>(bands * width));
    let rounded = (values == Values::Narrow).then(|| tape.room::<u16>(count));
    let narrow = rounded.map_or(Argument::Null, Argument::from);
    let places = [raw, factors, temperature, cosines, sines].map(Argument::from);
    let results = [grad.into(), narrow, means.into()];
    let sums = partial.map(Argument::from);
    let arguments = [&places[..], &given, &results, &sums, &sizes].concat();
    tape.launch("query_key_backward", keys * bands, &arguments);
    let sums = widths.map(|width| tape.room::<f32>(width));
    for (width, (partial, out)) in widths.into_iter().zip(partial.into_iter().zip(sums)) {
        finish(&mut tape, [tokens, width], &[Unfinished::sum((partial, 0), (out, 0))]);
    }
    Rotated { tape, rounded, raw, forward: [factors, out], grad, means, sums }
}

#[test]
fn queries_and_keys_are_those_of_the_cpu() {
    let cases = [
        ([1, 1, 1, 2, 1], Values::Wide, false),
        ([40, 6, 2, 24, 8], Values::Wide, true),
        ([33, 4, 4, 37, 5], Values::Narrow, false),
        ([33, 4, 2, 37, 5], Values::Narrow, true),
        ([35, 3, 1, 66, 33], Values::Narrow, true),
    ];
    for (shape, values, apart) in cases {
        let turned = turned(shape, values, apart);
        let played = turned.tape.play();
        let [tokens, queries, keys, width, half] = shape.map(|size| size as i64);
        let heads = queries + keys;
        let by_head = [heads, tokens, width];
        let of = |seed, shape: &[i64]| {
            tensor(&numbers(shape.iter().product::<i64>() as usize, seed), shape)
        };
        let z = values.tensor(&[tokens, heads * width + 3], 1);
        let made_of = values.tensor(&by_head, 2);
        let of_heads = |heads, seed| Values::Narrow.tensor(&[heads, tokens, width], seed);
        let grad = match apart {
            true => HeadGrads::Apart([of_heads(queries, 3), of_heads(keys, 4)]),
            false => HeadGrads::Stacked(of(3, &by_head)),
        };
        let (bias, temperature) = (of(5, &[heads * width]), of(6, &[keys]));
        let (cosines, sines) = (of(7, &[tokens, half]), of(8, &[tokens, half]));
        let by = QueryKey {
            bias: &bias,
            temperature: &temperature,
            angles: [&cosines, &sines],
            shape: [queries, keys, width],
        };
        let QueriesAndKeys { out, raw, factors } = CPU.query_key(&z, made_of, by).unwrap();
        assert_eq!(left_bits(&played, turned.raw), bits_of(&raw));
        assert_eq!(left_bits(&played, turned.forward[0]), bits_of(&factors));
        assert_eq!(values.read(&played, turned.forward[1], &by_head), out);
        let wanted = CPU.query_key_backward(&raw, &factors, by, grad, Kind::Float).unwrap();
        assert_eq!(left_bits(&played, turned.grad), bits_of(&wanted.raw));
        if let Some(rounded) = turned.rounded {
            let found = values.read(&played, rounded, &by_head);
            assert_eq!(found, wanted.raw.to_kind(Kind::BFloat16));
        }
        assert_eq!(left_bits(&played, turned.means), bits_of(&wanted.means));
        for (found, wanted) in turned.sums.into_iter().zip([wanted.bias, wanted.temperature]) {
            assert_eq!(left_bits(&played, found), bits_of(&made(wanted)));
        }
    }
}

/// A convolution in bf16 that reads columns four at a time.
pub(super) fn wide(shape: Shape) -> Tape {
    conv(shape, Values::Narrow, None).tape
}

pub(super) fn small() -> Vec<Tape> {
    [Values::Wide, Values::Narrow]
        .into_iter()
        .flat_map(|values| {
            let some = [1, 2, 5, 33];
            [
                conv([35, 2, 5, 4, 3], values, Some(&some)).tape,
                turned([9, 4, 2, 20, 7], values, false).tape,
            ]
        })
        .collect()
}

/// Heads of 128 dimensions over more rows than a band or a tile has.
pub(super) fn large() -> Vec<Tape> {
    let of = |values| {
        let some: Vec<i64> = (0..130).filter(|row| row % 3 != 1).collect();
        let conv = conv([130, 3, 128, 128, 64], values, Some(&some)).tape;
        [conv, turned([70, 8, 2, 128, 32], values, false).tape]
    };
    [Values::Wide, Values::Narrow].into_iter().flat_map(of).collect()
}
