//! The elementwise parts of the loss, of the optimizers and of communication.

use tch::{Device, Kind, Tensor};

use super::exact::{Piece, table};
use super::tape::{Argument, Buffer, Tape};
use super::{Values, bits, bits_of, close, left_bits, numbers, tensor};
use crate::ops::{AdamWStep, CPU, Update, UpdateRule};

const BY: AdamWStep = AdamWStep {
    keep: 0.99,
    first: 0.1,
    second: 0.01,
    root: 0.3,
    eps: 1e-3,
    rate: 0.02,
    scale: 0.7,
};

/// A tensor to be updated: its number of elements; by how many elements it is misaligned; whether AdamW updates it,
/// otherwise Muon; and whether a bf16 copy is written.
type UpdateCase = (usize, usize, bool, bool);

/// The number of the first element of the tensor at `index` of a table.
fn number(index: u64) -> u64 {
    (1 << 32) - 40_000 + index
}

/// A row of a table (`Move` in `optimizer.h`) without its addresses.
fn row(elements: usize, index: u64, block: usize) -> [u64; 14] {
    let pair = |low: f32, high: u32| u64::from(low.to_bits()) | u64::from(high) << 32;
    let pairs = [[BY.keep, BY.rate], [BY.scale, BY.first], [BY.second, BY.root]];
    let [one, two, three] = pairs.map(|[low, high]| pair(low, high.to_bits()));
    let (count, last) = (elements as u64, pair(BY.eps, block as u32));
    [0, 0, 0, 0, 0, count, number(index), index << 40, 8, 9, one, two, three, last]
}

/// Results of an update for each tensor: weights, both moments, the bf16 copy, the direction; and the sums of all
/// chunks.
struct UpdateResults {
    tape: Tape,
    of_each: Vec<[Buffer; 5]>,
    words: Buffer,
}

/// Updates tensors; then repeats Muon's momenta with memory for their directions.
fn moved(tensors: &[UpdateCase]) -> UpdateResults {
    let mut tape = Tape::new("update_chunks");
    let (mut of_each, mut rows, mut turned, mut chunks, mut blocks) =
        (Vec::new(), Vec::new(), Vec::new(), 0, 0);
    for (index, &(elements, behind, ..)) in (0u64..).zip(tensors) {
        let [weight, first, second, gradient] = inputs(elements, index).map(|values| {
            let mut all = vec![f32::NAN; behind];
            all.extend(Vec::<f32>::try_from(values).unwrap());
            tape.with(&all)
        });
        let [narrow, direction] =
            [tape.room::<u16>(elements + behind), tape.room::<f32>(elements + behind)];
        of_each.push(([weight, first, second, narrow, direction], gradient));
        rows.push(row(elements, index, chunks));
        turned.push(row(elements, index, blocks));
        (chunks, blocks) = (chunks + elements.div_ceil(65_536), blocks + elements.div_ceil(1024));
    }
    let [moves, momenta] = [rows, turned].map(|rows| tape.with(&rows.concat()));
    let all = of_each.iter().zip(tensors).enumerate();
    for (row, ((buffers, gradient), &(_, behind, adamw, rounded))) in all {
        let [weight, first, second, narrow, direction] = *buffers;
        let mut address = |table, place: usize, buffer, wide: usize| {
            tape.address(table, row * 112 + place * 8, buffer, behind * wide);
        };
        address(moves, 0, weight, 4);
        address(moves, 1, first, 4);
        if adamw {
            address(moves, 2, second, 4);
        }
        address(moves, 3, *gradient, 4);
        if rounded {
            address(moves, 4, narrow, 2);
        }
        address(momenta, 0, direction, 4);
        address(momenta, 1, first, 4);
        address(momenta, 3, *gradient, 4);
    }
    let words = tape.room::<u64>(4 * chunks);
    tape.launch("update_chunks", chunks, &[moves.into(), tensors.len().into(), words.into()]);
    let numbers = [BY.scale, 0.95f32].map(Argument::from);
    let arguments = [&[momenta.into(), tensors.len().into()][..], &numbers].concat();
    tape.launch("nesterov", blocks, &arguments);
    let of_each = of_each.into_iter().map(|(buffers, _)| buffers).collect();
    UpdateResults { tape, of_each, words }
}

/// Weights, first and second moments, and the gradient.
fn inputs(elements: usize, index: u64) -> [Tensor; 4] {
    let of = |seed: u64| tensor(&numbers(elements, 10 * index + seed), &[elements as i64]);
    [of(1), of(2), of(3).square(), of(4)]
}

/// Odd sizes, several chunks, and arbitrary alignment.
#[test]
fn optimizers_are_those_of_the_cpu() {
    let tensors: [UpdateCase; 9] = [
        (1, 0, true, true),
        (1024, 0, true, true),
        (1024, 3, false, true),
        (1025, 0, true, false),
        (300, 1, true, true),
        (3000, 0, false, false),
        (65_536, 0, false, true),
        (131_073, 1, true, true),
        (70_001, 0, true, true),
    ];
    let UpdateResults { tape, of_each, words } = moved(&tensors);
    let played = tape.play();
    let words = played.read::<i64>(words);
    let mut rows = words.chunks_exact(4);
    for ((index, (elements, behind, adamw, rounded)), left) in (0u64..).zip(tensors).zip(of_each) {
        let [mut weight, mut first, mut second, gradient] = inputs(elements, index);
        let mut narrow = Tensor::zeros([elements as i64], (Kind::BFloat16, Device::Cpu));
        let rule = match adamw {
            true => UpdateRule::AdamW { by: BY, moments: [&mut first, &mut second] },
            false => UpdateRule::Muon { keep: BY.keep, rate: BY.rate, momentum: &first },
        };
        let wanted = CPU.update(&mut [Update {
            weight: &mut weight,
            rounded: Some((&mut narrow, 0)),
            gradient: &gradient,
            rule,
            number: number(index),
            salts: [index << 40, 8, 9],
        }]);
        let wanted = Vec::<i64>::try_from(wanted.unwrap().view([-1])).unwrap();
        for wanted in wanted.chunks_exact(4) {
            assert_eq!(rows.next(), Some(wanted), "tensor {index}");
        }
        let direction = CPU.nesterov(&mut first, &gradient, 0.95, BY.scale).unwrap();
        let [own @ .., short, turned] = left;
        let wanted = [&weight, &first, &second, &direction];
        for (found, wanted) in own.into_iter().chain([turned]).zip(wanted) {
            assert_eq!(left_bits(&played, found)[behind..], bits_of(wanted), "tensor {index}");
        }
        let short = &played.read::<u16>(short)[behind..];
        match rounded {
            true => assert_eq!(super::tensor_bf16(short, &[elements as i64]), narrow),
            false => assert!(
                short.iter().all(|bits| *bits == u16::MAX),
                "a result that was not asked for"
            ),
        }
    }
    assert_eq!(rows.next(), None);
}

/// Intermediate results of the iteration for some matrices.
struct Iteration {
    tape: Tape,
    /// Normalized; times its transpose; the polynomial of two squares, from the table and by itself.
    left: [Buffer; 4],
}

/// Matrices of these sizes in one buffer.
fn iteration(sizes: &[[usize; 2]]) -> Iteration {
    let mut tape = Tape::new("newton_schulz");
    let total: usize = sizes.iter().map(|[rows, columns]| rows * columns).sum();
    let squared: usize = sizes.iter().map(|[rows, _]| rows * rows).sum();
    let x = tape.with(&numbers(total, 1));
    let [one, other] = [2, 3].map(|seed| tape.with(&numbers(squared, seed)));
    let (unit, square) = (tape.room::<f32>(total), tape.room::<f32>(squared));
    let (mut units, mut polynomials, mut products) = (Vec::new(), Vec::new(), Vec::<u32>::new());
    let (mut at, mut square_at, mut block, mut places) = (0, 0, 0, Vec::new());
    let piece = |left, right, elements, first| Piece {
        left,
        right: Some(right),
        elements,
        first,
        salt: 0,
        width: 4,
    };
    for &[rows, columns] in sizes {
        units.push(([4 * at; 2], piece(x, unit, rows * columns, 0)));
        polynomials.push(([4 * square_at; 2], piece(one, other, rows * rows, rows as u64)));
        let numbers = [rows, rows, columns, block, columns, 1, columns, 1];
        let numbers = numbers.map(|number| number as u32);
        products.extend([&[0; 6][..], &numbers, &[1, 0]].concat());
        places.push([at, square_at]);
        block += rows.div_ceil(64) * (rows.div_ceil(64) + 1) / 2;
        (at, square_at) = (at + rows * columns, square_at + rows * rows);
    }
    let count = Argument::from(sizes.len());
    let (pieces, blocks) = table(&mut tape, &units);
    let lengths = tape.room::<f64>(sizes.len());
    let arguments = [pieces.into(), count, lengths.into()];
    tape.launch("squares", sizes.len(), &[&arguments[..], &[Argument::Null]].concat());
    tape.launch("unit_blocks", blocks, &[&arguments[..], &[Argument::Float(1e-7)]].concat());
    let words = tape.with(&products);
    for (row, [at, square_at]) in places.into_iter().enumerate() {
        for (word, (target, at)) in [(unit, at), (unit, at), (square, square_at)].iter().enumerate()
        {
            tape.address(words, 64 * row + 8 * word, *target, 4 * at);
        }
    }
    tape.launch("stacked_products", block, &[words.into(), count]);
    let by = [3.4445f32, -4.775, 2.0315].map(Argument::from);
    let alone = tape.with(&numbers(sizes[0][0].pow(2), 3));
    let places = [one.into(), alone.into(), sizes[0][0].into(), Argument::Word(1)];
    let elements = sizes[0][0].pow(2).div_ceil(1024);
    tape.launch("newton_schulz_polynomial", elements, &[&places[..], &by].concat());
    let (pieces, blocks) = table(&mut tape, &polynomials);
    tape.launch("polynomial_blocks", blocks, &[&[pieces.into(), count][..], &by].concat());
    Iteration { tape, left: [unit, square, other, alone] }
}

#[test]
fn iterations_are_those_of_the_cpu() {
    for sizes in [&[[1, 1]][..], &[[20, 33], [65, 70], [3, 1]], &[[70, 5]]] {
        let Iteration { tape, left } = iteration(sizes);
        let played = tape.play();
        let [unit, square, other, alone] = left;
        let [unit, square, other] = [unit, square, other].map(|of| played.read::<f32>(of));
        let total = unit.len();
        let (x, one, two) = (numbers(total, 1), numbers(square.len(), 2), numbers(square.len(), 3));
        let (mut at, mut square_at) = (0, 0);
        for (index, &[rows, columns]) in sizes.iter().enumerate() {
            let (here, there) = (at..at + rows * columns, square_at..square_at + rows * rows);
            let shape = [rows as i64, columns as i64];
            let own = tensor(&x[here.clone()], &shape);
            let length = CPU.squares(&own).unwrap().sqrt() as f32 + 1e-7;
            let own = own / Tensor::from(length);
            assert_eq!(bits(&unit[here]), bits_of(&own), "{sizes:?}");
            let exact = own.to_kind(Kind::Double);
            close(&square[there.clone()], &exact.mm(&exact.tr()), 1e-6);
            let [a, b, c] = [3.4445f32, -4.775, 2.0315].map(f64::from);
            let [left, right] = [&one, &two].map(|of| tensor(&of[there.clone()], &[shape[0]; 2]));
            let ones = Tensor::eye(shape[0], (Kind::Float, Device::Cpu));
            let wanted = left * b + right * c + ones * a;
            assert_eq!(bits(&other[there]), bits_of(&wanted));
            if index == 0 {
                assert_eq!(left_bits(&played, alone), bits_of(&wanted));
            }
            (at, square_at) = (at + rows * columns, square_at + rows * rows);
        }
    }
}

struct Loss {
    tape: Tape,
    found: [Buffer; 5],
}

fn labels(tokens: usize, size: usize) -> Vec<i64> {
    (0..tokens).map(|token| (token * 7 % size) as i64).collect()
}

fn masks(tokens: usize) -> Vec<f32> {
    (0..tokens).map(|token| if token % 4 == 1 { 0.0 } else { 1.0 }).collect()
}

const HIDDEN: usize = 11;

fn loss([tokens, size]: [usize; 2], shards: usize, z_loss: f32, values: Values) -> Loss {
    let kind = values.kind();
    let name = if z_loss > 0.0 { "z_loss" } else { "cross_entropy" };
    let mut tape = Tape::new(&format!("{name}_{kind}"));
    let logits = values.scaled(&mut tape, tokens * size, 1, 20.0);
    let (labels, mask) = (tape.with(&labels(tokens, size)), tape.with(&masks(tokens)));
    let [log_sum, losses] = [(); 2].map(|()| tape.room::<f32>(tokens));
    let places = [logits, labels, mask, log_sum, losses].map(Argument::from);
    let arguments = [&places[..], &[size.into(), shards.into()]].concat();
    tape.launch(&format!("cross_entropy_{kind}"), tokens, &arguments);
    let places = [logits, labels, log_sum].map(Argument::from);
    let arguments = [&places[..], &[z_loss.into(), size.into()]].concat();
    tape.launch(&format!("cross_entropy_slope_{kind}"), tokens, &arguments);
    let x = values.with(&mut tape, tokens * HIDDEN, 2);
    let out = values.room(&mut tape, tokens * HIDDEN);
    let arguments = [x.into(), mask.into(), out.into(), Argument::Float(37.0), HIDDEN.into()];
    tape.launch(&format!("scale_rows_{kind}"), tokens, &arguments);
    let x = tape.with(&numbers(tokens * HIDDEN, 2));
    let short = tape.room::<u16>(tokens * HIDDEN);
    let arguments = [x.into(), mask.into(), short.into(), Argument::Float(37.0), HIDDEN.into()];
    tape.launch("scale_rows_narrow", tokens, &arguments);
    Loss { tape, found: [log_sum, losses, logits, out, short] }
}

#[test]
fn losses_agree_with_libtorch() {
    for (shape, shards, z_loss, values) in [
        ([1, 1], 1, 0.0, Values::Wide),
        ([9, 1000], 1, 0.0, Values::Wide),
        ([9, 1000], 7, 0.125, Values::Wide),
        ([7, 300], 2, 0.0, Values::Narrow),
        ([7, 300], 2, 0.125, Values::Narrow),
    ] {
        let loss = loss(shape, shards, z_loss, values);
        let played = loss.tape.play();
        let [tokens, size] = shape.map(|size| size as i64);
        let logits =
            (tensor(&numbers(shape[0] * shape[1], 1), &[tokens, size]) * 20.0).to_kind(values.of());
        let exact = logits.to_kind(Kind::Double);
        let log_sum = exact.logsumexp([1].as_slice(), true);
        close(&played.read::<f32>(loss.found[0]), &log_sum, 2e-7);
        let labels = Tensor::from_slice(&labels(shape[0], shape[1])).unsqueeze(1);
        let mask = tensor(&masks(shape[0]), &[tokens, 1]);
        let losses = (&log_sum - exact.gather(1, &labels, false)) * mask.to_kind(Kind::Double);
        close(&played.read::<f32>(loss.found[1]), &losses, 2e-7);
        let factor = &log_sum * f64::from(2.0 * z_loss) + 1.0;
        let mut slope = (exact - log_sum).exp() * factor;
        let _ = slope.scatter_add_(1, &labels, &(labels.ones_like().to_kind(Kind::Double) * -1.0));
        let found = values.read(&played, loss.found[2], &[tokens, size]).to_kind(Kind::Float);
        let within = if values == Values::Wide { 4e-6 } else { 2f64.powi(-8) };
        close(&Vec::<f32>::try_from(&found.reshape([-1])).unwrap(), &slope, within);
        let x = values.tensor(&[tokens, HIDDEN as i64], 2);
        let wide = tensor(&numbers(shape[0] * HIDDEN, 2), &[tokens, HIDDEN as i64]);
        let wanted = (wide * (&mask / 37.0)).to_kind(Kind::BFloat16);
        let found = super::tensor_bf16(&played.read(loss.found[4]), &[tokens, HIDDEN as i64]);
        assert_eq!(found, wanted);
        let wanted = (x.to_kind(Kind::Float) * (mask / 37.0)).to_kind(values.of());
        assert_eq!(values.read(&played, loss.found[3], &[tokens, HIDDEN as i64]), wanted);
    }
}

/// Exponentials are added within a shard first, then over shards in the order of the tree.
#[test]
fn shards_of_a_vocabulary_are_added_in_the_tree() {
    // Two of these change a sum of 1, one alone does not.
    let small = 5e-8f32.ln();
    let unit = 2f64.powi(-23);
    for (size, shards, units) in [(4, 4, 1.0), (6, 1, 2.0), (6, 2, 1.0), (6, 6, 2.0), (3, 3, 0.0)] {
        let mut logits = vec![small; size];
        logits[0] = 0.0;
        let mut tape = Tape::new("shards");
        let (logits, labels, mask) = (tape.with(&logits), tape.with(&[0i64]), tape.with(&[1f32]));
        let [log_sum, losses] = [(); 2].map(|()| tape.room::<f32>(1));
        let places = [logits, labels, mask, log_sum, losses].map(Argument::from);
        let arguments = [&places[..], &[size.into(), shards.into()]].concat();
        tape.launch("cross_entropy_f32", 1, &arguments);
        let found = f64::from(tape.play().read::<f32>(losses)[0]);
        assert!((found - units * unit).abs() < 0.01 * unit, "{size} {shards}: {found:e}");
    }
}

/// A piece of a table that only pairs elements of this width.
fn piece(left: Buffer, right: Buffer, elements: usize, width: u32) -> Piece {
    Piece { left, right: Some(right), elements, first: 0, salt: 0, width }
}

/// Packs tensors of these sizes into one buffer, unpacks it into one with a gap, copies all in bf16, and rounds it.
fn packed(sizes: &[usize]) -> (Tape, [Buffer; 4]) {
    let mut tape = Tape::new("transport");
    let total: usize = sizes.iter().sum();
    let all: Vec<f32> =
        (1..).zip(sizes).flat_map(|(seed, &elements)| numbers(elements, seed)).collect();
    let (flat, narrow) = (tape.room::<f32>(total), tape.with(&super::bf16(&all)));
    let again = tape.room::<f32>(total + 1);
    let [short, rounded] = [0; 2].map(|_| tape.room::<u16>(total));
    let (mut there, mut back, mut at) = (Vec::new(), Vec::new(), 0);
    for (seed, &elements) in (1..).zip(sizes) {
        let left = tape.with(&numbers(elements, seed));
        there.push(([0, at * 4], piece(left, flat, elements, 4)));
        back.push(([at * 4, at * 4 + 4], piece(flat, again, elements, 4)));
        at += elements;
    }
    for rows in [there, back, vec![([0, 0], piece(narrow, short, total, 2))]] {
        let count = rows.len();
        let (table, blocks) = table(&mut tape, &rows);
        tape.launch("copy_blocks", blocks, &[table.into(), count.into()]);
    }
    let rows = [([0, 0], piece(flat, rounded, total, 4))];
    let (table, blocks) = table(&mut tape, &rows);
    tape.launch("round_blocks", blocks, &[table.into(), rows.len().into()]);
    (tape, [flat, again, short, rounded])
}

#[test]
fn pieces_travel_whole() {
    let sizes = [1, 4096, 5000, 3];
    let (tape, [flat, again, short, rounded]) = packed(&sizes);
    let played = tape.play();
    let wanted: Vec<f32> =
        (1..).zip(&sizes).flat_map(|(seed, &elements)| numbers(elements, seed)).collect();
    assert_eq!(left_bits(&played, flat), bits(&wanted));
    assert_eq!(left_bits(&played, again)[1..], bits(&wanted));
    let wanted = Tensor::from_slice(&wanted).to_kind(Kind::BFloat16);
    for found in [short, rounded] {
        let found = super::tensor_bf16(&played.read(found), &[wanted.size()[0]]);
        assert_eq!(found, wanted);
    }
}

/// A chunk's numbers per expert, and its number of rows.
type Chunk<'a> = (&'a [i64], u64);

/// Adds the experts of one chunk to those of another, and a part without an expert.
fn present(left: Chunk, right: Chunk, each: usize) -> (Tape, [Buffer; 3]) {
    let ((here, one), (there, two)) = (left, right);
    let mut tape = Tape::new("experts of chunks");
    let [left, right] = [one, two].map(|seed| tape.with(&parts(here.len() * each, seed)));
    let plain = [one + 7, two + 7].map(|seed| tape.with(&numbers(each, seed)));
    let [counts, other_counts] = [here, there].map(|rows| tape.with(rows));
    let both = tape.room::<i64>(here.len());
    let experts = 0..here.len();
    let mut rows: Vec<_> = experts
        .clone()
        .map(|expert| ([4 * each * expert; 2], piece(left, right, each, 4)))
        .collect();
    rows.push(([0, 0], piece(plain[0], plain[1], each, 4)));
    rows.push(([0, 0], piece(counts, other_counts, here.len(), 8)));
    let (table, blocks) = table(&mut tape, &rows);
    for expert in experts {
        tape.address(table, 48 * expert + 24, counts, 8 * expert);
        tape.address(table, 48 * expert + 32, other_counts, 8 * expert);
    }
    tape.address(table, 48 * (here.len() + 1) + 24, both, 0);
    tape.launch("add_present", blocks, &[table.into(), rows.len().into()]);
    (tape, [left, plain[0], both])
}

/// Numbers of which every third is -0.0, which adding 0.0 would change.
fn parts(count: usize, seed: u64) -> Vec<f32> {
    let values = numbers(count, seed).into_iter().enumerate();
    values.map(|(at, value)| if at % 3 == 0 { -0.0 } else { value }).collect()
}

#[test]
fn an_expert_without_rows_has_no_part_in_a_sum() {
    for each in [1, 3, 5000] {
        let (here, there) = ([3i64, 0, 2, 0], [0i64, 4, 1, 0]);
        let (tape, [sum, plain, both]) = present((&here, 1), (&there, 2), each);
        let played = tape.play();
        let [left, right] = [1, 2].map(|seed| parts(4 * each, seed));
        let wanted = left.iter().zip(&right).enumerate().map(|(at, (left, right))| {
            match (here[at / each] > 0, there[at / each] > 0) {
                (true, true) => left + right,
                (false, true) => *right,
                (_, false) => *left,
            }
        });
        assert_eq!(left_bits(&played, sum), bits(&wanted.collect::<Vec<_>>()));
        let [left, right] = [8, 9].map(|seed| numbers(each, seed));
        let wanted: Vec<f32> = left.iter().zip(&right).map(|(left, right)| left + right).collect();
        assert_eq!(left_bits(&played, plain), bits(&wanted));
        assert_eq!(played.read::<i64>(both), [3, 4, 3, 0]);
    }
}

/// Weights updated by AdamW, weights updated by Muon, and their bf16 copies.
pub(super) fn wide(elements: usize) -> [Tape; 2] {
    [true, false].map(|adamw| moved(&[(elements, 0, adamw, true)]).tape)
}

pub(super) fn small() -> Vec<Tape> {
    let losses = [0.0, 0.125].into_iter().flat_map(|z_loss| {
        [Values::Wide, Values::Narrow].map(|values| loss([3, 260], 3, z_loss, values).tape)
    });
    let few = [(2050, 0, true, true), (1030, 1, true, false), (3, 0, false, true)];
    let mut tapes = vec![moved(&few).tape, iteration(&[[5, 7], [2, 3]]).tape, packed(&[4100, 7]).0];
    tapes.push(present((&[0, 2, 8], 1), (&[5, 0, 8], 2), 300).0);
    tapes.extend(losses);
    tapes
}

/// Vocabularies of many blocks, and matrices of several tiles.
pub(super) fn large() -> Vec<Tape> {
    let losses = [Values::Wide, Values::Narrow].map(|values| loss([40, 5003], 3, 0.0, values).tape);
    let shapes = [[64, 128], [65, 70], [130, 136]];
    let many = [(200_003, 0, true, true), (70_003, 1, true, true), (66_000, 0, false, true)];
    let mut tapes = vec![moved(&many).tape, iteration(&shapes).tape, packed(&[100_003, 70_000]).0];
    tapes.push(present((&[0, 2, 8], 1), (&[5, 0, 8], 2), 70_001).0);
    tapes.extend(losses);
    tapes
}
