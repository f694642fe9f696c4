//! Attention over the documents of a chunk, compared to f64.

use tch::{Kind, Tensor};

use super::tape::{Argument, Buffer, Tape};
use super::{Values, close};
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
    let kind = values.kind();
    let mut tape = Tape::new(&format!("attention_{kind}"));
    let [queries, all] = tokens(spans);
    let query = values.with(&mut tape, heads * queries * width, 1);
    let key = values.with(&mut tape, keys * all * width, 2);
    let value = values.with(&mut tape, all * keys * width, 3);
    let grad = values.with(&mut tape, queries * heads * width, 4);
    let (mut words, mut first, mut tile, mut key_tile) = (Vec::<u32>::new(), 0, 0, 0);
    let tiles = |rows: i64| (rows as usize).div_ceil(32);
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
    let mut launch = |name: &str, blocks, memory: &[Argument]| {
        let arguments = [&operands[..], memory, &numbers].concat();
        tape.launch(&format!("{name}_{kind}"), blocks, &arguments);
    };
    launch("attention", heads * tile, &[out.into(), logs.into()]);
    let memory = [out, logs, grad, back[0], along].map(Argument::from);
    launch("attention_queries", heads * tile, &memory);
    let memory = [logs, along, grad, back[1]].map(Argument::from);
    let values = [Argument::Null, back[2].into()];
    launch("attention_keys", keys * key_tile, &[&memory[..], &values].concat());
    Attended { tape, out, back }
}

/// The same in f64, by libtorch: the output and its gradients.
fn exact(
    [heads, keys, width]: Shape,
    spans: &[AttentionSpan],
    window: usize,
    values: Values,
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
        let ago = place(span.before, span.keys()).unsqueeze(1) - place(0, span.keys());
        let hidden = ago.lt(0).logical_or(&ago.ge(window as i64));
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
        let attended = attended(shape, spans, window, values);
        let played = attended.tape.play();
        let [out, query, key, value] = exact(shape, spans, window, values);
        let found = values.read(&played, attended.out, &out.size()).to_kind(Kind::Float);
        let found = Vec::<f32>::try_from(&found.reshape([-1])).unwrap();
        let narrow = values == Values::Narrow;
        close(&found, &out, if narrow { 2f64.powi(-8) } else { 2e-6 });
        for (found, wanted) in attended.back.into_iter().zip([query, key, value]) {
            // The backward pass reads what the forward pass has rounded.
            close(&played.read(found), &wanted, if narrow { 0.02 } else { 4e-6 });
        }
    }
}

pub(super) fn small() -> Vec<Tape> {
    let spans = [AttentionSpan { start: 0, len: 2, before: 31 }];
    let all = [Values::Wide, Values::Narrow];
    all.map(|values| attended([2, 1, 5], &spans, NONE, values).tape).into()
}

/// Several documents in one launch, parts of some, more than one tile of keys, at the width of the models' heads.
pub(super) fn large() -> Vec<Tape> {
    let part = AttentionSpan { start: 34, len: 40, before: 50 };
    let spans = [
        AttentionSpan::whole(0, 33),
        AttentionSpan::whole(33, 1),
        part,
        AttentionSpan::whole(74, 70),
    ];
    let all = [Values::Wide, Values::Narrow];
    all.map(|values| attended([4, 2, 128], &spans, NONE, values).tape).into()
}
