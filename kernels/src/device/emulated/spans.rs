//! Attention over the documents of a chunk, compared to f64.

use tch::{Kind, Tensor};

use super::tape::{Argument, Buffer, Tape};
use super::{Values, far};
use crate::ops::AttentionSpan;

/// Heads, key heads and dimensions.
type Shape = [usize; 3];

/// A window over any document.
const NONE: usize = i32::MAX as usize;

struct Attended {
    tape: Tape,
    out: Buffer,
    /// Gradients of queries, keys and values, f32.
    back: [Buffer; 3],
}

fn tokens(spans: &[AttentionSpan]) -> [usize; 2] {
    let [queries, keys] =
        [AttentionSpan::clone, |span: &AttentionSpan| AttentionSpan::whole(0, span.keys())]
            .map(|of| spans.iter().map(|span| of(span).len as usize).sum());
    [queries, keys]
}

/// Forward and backward over `spans`, with numbers generated from `seed` on; a query sees `window` keys.
fn attended(
    [heads, keys, width]: Shape,
    spans: &[AttentionSpan],
    window: usize,
    values: Values,
) -> Attended {
    // In bf16 a kernel for the width.
    let (kind, tile_rows) = match (values, width) {
        (Values::Wide, _) => ("f32", 32),
        (Values::Narrow, ..=64) => ("64_bf16", 128),
        (Values::Narrow, ..=128) => ("128_bf16", 128),
        (Values::Narrow, _) => ("256_bf16", 128),
    };
    let mut tape = Tape::new(&format!("attention_{kind}"));
    let [queries, all] = tokens(spans);
    let query = values.with(&mut tape, heads * queries * width, 1);
    let key = values.with(&mut tape, keys * all * width, 2);
    let value = values.with(&mut tape, all * keys * width, 3);
    let grad = values.with(&mut tape, queries * heads * width, 4);
    let (mut words, mut first, mut tile, mut key_tile) = (Vec::<u32>::new(), 0, 0, 0);
    let tiles = |rows: i64| (rows as usize).div_ceil(tile_rows);
    for span in spans {
        words.extend([span.start, span.len, span.before, first].map(|word| word as u32));
        words.extend([tile, key_tile].map(|word| word as u32));
        first += span.keys();
        (tile, key_tile) = (tile + tiles(span.len), key_tile + tiles(span.keys()));
    }
    let table = tape.with(&words);
    let out = values.room(&mut tape, queries * heads * width);
    let [logs, along] = [(); 2].map(|()| tape.room::<f32>(heads * queries));
    let back = [heads * queries, keys * all, all * keys].map(|rows| tape.room::<f32>(rows * width));
    let sizes = [spans.len(), queries, all, heads, keys, width, window].map(Argument::from);
    let numbers = [&sizes[..], &[(1.0 / (width as f32).sqrt()).into()]].concat();
    let operands = [query, key, value, table].map(Argument::from);
    let mut launch = |name: String, blocks, memory: &[Argument]| {
        let arguments = [&operands[..], memory, &numbers].concat();
        tape.launch(&name, blocks, &arguments);
    };
    launch(format!("attention_{kind}"), heads * tile, &[out.into(), logs.into()]);
    let memory = [out, logs, grad, back[0], along].map(Argument::from);
    launch(format!("attention_queries_{kind}"), heads * tile, &memory);
    let memory = [logs, along, grad, back[1]].map(Argument::from);
    let narrow = values == Values::Narrow;
    let values = [Argument::Null, back[2].into()];
    let memory = [&memory[..], &values].concat();
    launch(format!("attention_keys_{kind}"), keys * key_tile, &memory);
    if narrow {
        // As far as both may be from f64.
        tape.near::<u16>(out, BOUNDS[0]);
        tape.near::<f32>(logs, 1e-5);
        [along].iter().chain(&back).for_each(|sums| tape.near::<f32>(*sums, BOUNDS[1]));
    }
    Attended { tape, out, back }
}

/// The same in f64, by libtorch: the output and its gradients. A query does not see what `hides` of how long ago a key
/// was, and of its place in the document.
fn exact(
    [heads, keys, width]: Shape,
    spans: &[AttentionSpan],
    values: Values,
    hides: impl Fn(&Tensor, &Tensor) -> Tensor,
) -> [Tensor; 4] {
    let [heads, keys, width] = [heads, keys, width].map(|size| size as i64);
    let [queries, all] = tokens(spans).map(|count| count as i64);
    let of = |shape: &[i64], seed| {
        let tensor = values.tensor(shape, seed).to_kind(Kind::Double);
        tensor.set_requires_grad(true)
    };
    let query = of(&[heads, queries, width], 1);
    let (key, value) = (of(&[keys, all, width], 2), of(&[all, keys, width], 3));
    let grad = values.tensor(&[queries, heads * width], 4).to_kind(Kind::Double);
    let (mut outs, mut first) = (Vec::new(), 0);
    for span in spans {
        let own = query.narrow(1, span.start, span.len).unflatten(0, [keys, heads / keys]);
        let seen = key.narrow(1, first, span.keys()).unsqueeze(1);
        let scores = own.matmul(&seen.transpose(-1, -2)) / (width as f64).sqrt();
        let place = |first, end| Tensor::arange_start(first, end, (Kind::Int64, tch::Device::Cpu));
        let at = place(0, span.keys());
        let ago = place(span.before, span.keys()).unsqueeze(1) - &at;
        let hidden = hides(&ago, &at);
        let chances = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
        let value = value.narrow(0, first, span.keys()).transpose(0, 1).unsqueeze(1);
        outs.push(chances.matmul(&value).permute([2, 0, 1, 3]).reshape([span.len, -1]));
        first += span.keys();
    }
    let out = Tensor::cat(&outs, 0);
    (&out * grad).sum(Kind::Double).backward();
    [out.detach(), query.grad(), key.grad(), value.grad()]
}

/// Documents of one token and of several tiles, parts of documents, heads wider than a slice; windows of one key, of
/// less than a tile and of more, so that whole tiles are skipped, and some queries of a tile see none of its keys.
#[test]
fn attention_is_that_of_f64() {
    let part = |start, len, before| AttentionSpan { start, len, before };
    let long = [part(0, 70, 100), AttentionSpan::whole(70, 90)];
    let cases: [(Shape, &[AttentionSpan], usize, Values); 10] = [
        ([2, 1, 5], &long, 1, Values::Wide),
        ([2, 1, 5], &long, 7, Values::Wide),
        ([2, 2, 5], &long, 32, Values::Wide),
        ([1, 1, 5], &long, 45, Values::Wide),
        ([2, 1, 66], &long, 33, Values::Narrow),
        ([1, 1, 1], &[AttentionSpan::whole(0, 1)], NONE, Values::Wide),
        (
            [4, 2, 16],
            &[
                AttentionSpan::whole(0, 33),
                AttentionSpan::whole(33, 1),
                AttentionSpan::whole(34, 70),
            ],
            NONE,
            Values::Wide,
        ),
        ([3, 1, 7], &[part(0, 40, 50), part(40, 3, 0), part(43, 5, 31)], NONE, Values::Wide),
        ([2, 1, 130], &[part(0, 20, 37), part(20, 40, 0)], NONE, Values::Narrow),
        ([2, 2, 256], &[AttentionSpan::whole(0, 35)], NONE, Values::Wide),
    ];
    for (shape, spans, window, values) in cases {
        let found = found(attended(shape, spans, window, values), values);
        let exact = exact(shape, spans, values, |ago, _| seen(ago, window).logical_not());
        assert!(is_that_of(&found, &exact, values), "{shape:?}, window {window}");
    }
}

/// Keys of the last `window` tokens.
fn seen(ago: &Tensor, window: usize) -> Tensor {
    ago.ge(0).logical_and(&ago.lt(window as i64))
}

/// Output and gradients that a tape leaves.
fn found(attended: Attended, values: Values) -> [Vec<f32>; 4] {
    let played = attended.tape.play();
    let out = match values {
        Values::Wide => played.read(attended.out),
        Values::Narrow => played.read::<u16>(attended.out).into_iter().map(wide).collect(),
    };
    let [query, key, value] = attended.back.map(|back| played.read(back));
    [out, query, key, value]
}

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// How far bf16 may be from f64 in the output and in gradients.
const BOUNDS: [f64; 2] = [1.0 / 256.0, 0.02];

/// Whether all are within rounding of exact ones. In bf16 chances and their gradients are rounded before they are
/// multiplied, and the backward pass reads what the forward pass has rounded.
fn is_that_of(found: &[Vec<f32>; 4], exact: &[Tensor; 4], values: Values) -> bool {
    let [out, back] = if values == Values::Narrow { BOUNDS } else { [2e-6, 4e-6] };
    let limits = [out, back, back, back];
    found.iter().zip(exact).zip(limits).all(|((found, exact), limit)| far(found, exact) <= limit)
}

/// Queries and keys over several blocks, at the three widths of the kernels: within rounding of f64, and of nothing
/// else. A mask that is off by one, a window of one more or less, and a block of keys that is passed over are found.
#[test]
fn matrix_units_see_what_they_should() {
    let spans = [AttentionSpan { start: 0, len: 140, before: 20 }, AttentionSpan::whole(140, 133)];
    for (width, window) in [(64, NONE), (128, 40), (192, 129)] {
        let shape = [2, 1, width];
        let found = found(attended(shape, &spans, window, Values::Narrow), Values::Narrow);
        let agrees = |sees: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
            let exact = exact(shape, &spans, Values::Narrow, |ago, at| sees(ago, at).logical_not());
            is_that_of(&found, &exact, Values::Narrow)
        };
        assert!(agrees(&|ago, _| seen(ago, window)), "{width}");
        // A query always sees its own key: none of these hides all.
        let late = |ago: &Tensor, at: &Tensor| {
            let late = ago.ge(1).logical_or(&at.eq(0));
            seen(ago, window).logical_and(&late)
        };
        assert!(!agrees(&late), "{width}");
        let early = |ago: &Tensor, _: &Tensor| seen(&(ago + 1), window + 1);
        assert!(!agrees(&early), "{width}");
        for wrong in [window - 1, window + 1] {
            let other = |ago: &Tensor, _: &Tensor| seen(ago, wrong);
            assert!(window == NONE || !agrees(&other), "{width}: {wrong}");
        }
        for block in [0, 16, 96] {
            let skips = |ago: &Tensor, at: &Tensor| {
                let kept = at.lt(block).logical_or(&at.ge(block + 16)).logical_or(&ago.eq(0));
                seen(ago, window).logical_and(&kept)
            };
            assert!(!agrees(&skips), "{width}: {block}");
        }
    }
}

/// Heads for each of the kernels: f32, and bf16 of three widths.
fn every(spans: &[AttentionSpan], heads: [usize; 2], widths: [usize; 4]) -> Vec<Tape> {
    let [queries, keys] = heads;
    let of = |(number, width)| {
        let values = if number == 0 { Values::Wide } else { Values::Narrow };
        attended([queries, keys, width], spans, NONE, values).tape
    };
    widths.into_iter().enumerate().map(of).collect()
}

pub(super) fn small() -> Vec<Tape> {
    every(&[AttentionSpan { start: 0, len: 2, before: 31 }], [2, 1], [5, 5, 66, 130])
}

/// Several documents in one launch, parts of some, more than one tile of keys, at the width of the models' heads.
pub(super) fn large() -> Vec<Tape> {
    let part = AttentionSpan { start: 34, len: 40, before: 50 };
    let spans = [
        AttentionSpan::whole(0, 33),
        AttentionSpan::whole(33, 1),
        part,
        AttentionSpan::whole(74, 170),
    ];
    every(&spans, [4, 2], [128, 64, 128, 256])
}
