//! Newton-Schulz: small matrices all together, by products of our own; a larger one by itself, by the library's, whose batch
//! may have other bits than its members.
//!
//! Which way a matrix goes is decided by its size alone, and an element of our products is one chain of fused multiplications and
//! additions: so a matrix has the same bits whatever it comes with.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::{Argument, Queue};
use crate::Result;
use crate::device::pieces::{Piece, table};
use crate::ops::{NewtonSchulz, check};

/// Elements of the largest matrix that is small: of more, a library's products are worth their launches.
const SMALL: i64 = 1 << 17;

/// Rows and columns of a block (`SIDE` in `products.h`).
const SIDE: i64 = 64;

/// A matrix of what is iterated: in memory `rows` x `columns`, as it came.
#[derive(Clone, Copy)]
struct Matrix {
    rows: i64,
    columns: i64,
    /// Where it begins in a buffer of all of them, and its square in one of all squares.
    at: i64,
    square_at: i64,
}

impl Matrix {
    fn side(self) -> i64 {
        self.rows.min(self.columns)
    }

    fn wide(self) -> i64 {
        self.rows.max(self.columns)
    }

    /// How far rows and elements of a row lie apart, as a matrix that is not higher than wide.
    fn pitch(self) -> [i64; 2] {
        if self.rows > self.columns { [1, self.columns] } else { [self.columns, 1] }
    }
}

/// A row of the table of products (`Product` in `optimizer.h`): an address and how far rows and elements lie apart on either
/// side.
struct Product {
    left: (i64, [i64; 2]),
    right: (i64, [i64; 2]),
    out: i64,
    /// Rows, columns, and the index that is summed over.
    size: [i64; 3],
}

/// The rows of products, as they are uploaded, and their blocks.
fn products(all: impl Iterator<Item = Product>) -> (Vec<i64>, i64) {
    let (mut words, mut blocks) = (Vec::new(), 0);
    let tiles = |size: i64| (size + SIDE - 1) / SIDE;
    for Product { left, right, out, size: [rows, columns, inner] } in all {
        words.extend([left.0, right.0, out, rows | columns << 32, inner | blocks << 32]);
        words.extend([left.1, right.1].map(|[row, step]| row | step << 32));
        blocks += tiles(rows) * tiles(columns);
    }
    (words, blocks)
}

pub(super) fn newton_schulz(queue: &Queue, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let [rows, columns] = check::newton_schulz(stack)?;
    let matrices = stack.f_view([-1, rows, columns])?;
    let matrices: Vec<Tensor> = (0..matrices.size()[0])
        .map(|index| matrices.f_get(index))
        .collect::<std::result::Result<_, _>>()?;
    match (stack.dim(), all(queue, &matrices, by)?) {
        (2, mut made) => made.pop().ok_or_else(|| super::unreached("newton_schulz")),
        (_, made) => Ok(Tensor::f_stack(&made, 0)?),
    }
}

/// Of many matrices.
pub(super) fn all(queue: &Queue, matrices: &[Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
    let small = |matrix: &Tensor| matrix.numel() as i64 <= SMALL && matrix.numel() > 0;
    let together: Vec<&Tensor> = matrices.iter().filter(|matrix| small(matrix)).collect();
    let mut together = small_ones(queue, &together, by)?.into_iter();
    let turned = matrices.iter().map(|matrix| match small(matrix) {
        true => together.next().ok_or_else(|| super::unreached("newton_schulz")),
        false => large(queue, matrix, by),
    });
    turned.collect()
}

/// Matrices that are iterated together, and their memory.
struct Stack {
    matrices: Vec<Matrix>,
    /// X, before and after a step in turn.
    x: [Tensor; 2],
    /// `A` and `A A`, of which the polynomial is made.
    squares: [Tensor; 2],
}

/// A table of the iteration: its rows, as they are uploaded, and its blocks.
type Table = (Vec<i64>, i64);

impl Stack {
    fn of(queue: &Queue, given: &[&Tensor]) -> Result<Stack> {
        let (mut matrices, mut at, mut square_at) = (Vec::with_capacity(given.len()), 0, 0);
        for one in given {
            check::newton_schulz(one)?;
            let (rows, columns) = (one.size()[0], one.size()[1]);
            matrices.push(Matrix { rows, columns, at, square_at });
            at += rows * columns;
            square_at += rows.min(columns).pow(2);
        }
        let room = |count: i64| queue.room(&[count], Kind::Float);
        let (x, squares) = ([room(at)?, room(at)?], [room(square_at)?, room(square_at)?]);
        Ok(Stack { matrices, x, squares })
    }

    /// Where a matrix lies in the `which`-th of a pair of buffers.
    fn address(buffers: &[Tensor; 2], which: usize, at: i64) -> i64 {
        buffers[which].data_ptr() as i64 + 4 * at
    }

    fn products(&self, of: impl Fn(&Matrix) -> Product) -> Table {
        products(self.matrices.iter().map(of))
    }

    /// `A = X X^T`, from the `which`-th of both.
    fn first(&self, which: usize) -> Table {
        self.products(|matrix| {
            let own = (Stack::address(&self.x, which, matrix.at), matrix.pitch());
            let out = Stack::address(&self.squares, 0, matrix.square_at);
            let size = [matrix.side(), matrix.side(), matrix.wide()];
            Product { left: own, right: own, out, size }
        })
    }

    /// `A A`.
    fn second(&self) -> Table {
        self.products(|matrix| {
            let [from, out] =
                [0, 1].map(|which| Stack::address(&self.squares, which, matrix.square_at));
            let side = matrix.side();
            Product { left: (from, [side, 1]), right: (from, [1, side]), out, size: [side; 3] }
        })
    }

    /// `P X`, from the `which`-th of both to the other: as it lies, so of one that is higher than wide `X P`.
    fn last(&self, which: usize) -> Table {
        self.products(|matrix| {
            let (side, wide, [row, step]) = (matrix.side(), matrix.wide(), matrix.pitch());
            let factor = (Stack::address(&self.squares, 1, matrix.square_at), [side, 1]);
            let own = (Stack::address(&self.x, which, matrix.at), [step, row]);
            let out = Stack::address(&self.x, 1 - which, matrix.at);
            match matrix.rows > matrix.columns {
                true => Product { left: own, right: factor, out, size: [wide, side, side] },
                false => Product { left: factor, right: own, out, size: [side, wide, side] },
            }
        })
    }

    /// Each matrix as it was given, and where it begins its iteration.
    fn given(&self, given: &[&Tensor]) -> Result<Table> {
        let parts = self.parts(&self.x[0])?;
        let pairs = given.iter().zip(&parts);
        Ok(table(&pairs.map(|(given, part)| piece(given, part, 0)).collect::<Vec<_>>()))
    }

    /// `A` and `A A` of each.
    fn polynomials(&self) -> Result<Table> {
        let (mut pairs, [one, other]) = (Vec::new(), &self.squares);
        for matrix in &self.matrices {
            let part = |x: &Tensor| x.f_narrow(0, matrix.square_at, matrix.side().pow(2));
            pairs.push((part(one)?, part(other)?, matrix.side() as u64));
        }
        Ok(table(
            &pairs.iter().map(|(one, other, side)| piece(one, other, *side)).collect::<Vec<_>>(),
        ))
    }

    /// Each matrix of a buffer.
    fn parts(&self, buffer: &Tensor) -> Result<Vec<Tensor>> {
        let part = |Matrix { rows, columns, at, .. }: &Matrix| {
            Ok(buffer.f_narrow(0, *at, rows * columns)?.f_view([*rows, *columns])?)
        };
        self.matrices.iter().map(part).collect()
    }
}

/// `X <- P X` with `P = a I + b A + c A A`, `A = X X^T`, for all of them at once: four launches a step.
fn small_ones(queue: &Queue, given: &[&Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let stack = Stack::of(queue, given)?;
    let (second, polynomials) = (stack.second(), stack.polynomials()?);
    let turns = [stack.first(0), stack.last(0), stack.first(1), stack.last(1)];
    let all = [stack.given(given)?, second, polynomials].into_iter().chain(turns);
    // All tables travel at once.
    let (mut words, mut tables) = (Vec::new(), Vec::new());
    for (rows, blocks) in all {
        tables.push((words.len() as i64, rows.len() as i64, blocks));
        words.extend(rows);
    }
    let (words, count) = (queue.upload(&words)?, given.len() as i64);
    let launch = |kernel: &CStr, which: usize, rest: &[Argument]| -> Result<()> {
        let (first, length, blocks) = tables[which];
        let rows = words.f_narrow(0, first, length)?;
        let blocks = if kernel == c"squares" { (count + 15) / 16 } else { blocks };
        queue.launch(kernel, blocks, &[&[(&rows).into(), count.into()][..], rest].concat())
    };
    let lengths = queue.room(&[count], Kind::Double)?;
    launch(c"squares", 0, &[(&lengths).into()])?;
    launch(c"unit_blocks", 0, &[(&lengths).into(), by.eps.into()])?;
    let coefficients = by.coefficients.map(Argument::from);
    for step in 0..by.steps {
        let turn = 3 + 2 * (step % 2);
        launch(c"stacked_products", turn, &[])?;
        launch(c"stacked_products", 1, &[])?;
        launch(c"polynomial_blocks", 2, &coefficients)?;
        launch(c"stacked_products", turn + 1, &[])?;
    }
    stack.parts(&stack.x[by.steps % 2])
}

fn piece<'a>(tensor: &'a Tensor, other: &'a Tensor, first: u64) -> Piece<'a> {
    Piece { tensor, other: Some(other), first, salt: 0 }
}

/// The same of one by the library's products, with a pass of our own between them.
fn large(queue: &Queue, matrix: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
    let tall = matrix.size()[0] > matrix.size()[1];
    let matrix = if tall { matrix.f_tr()? } else { matrix.shallow_clone() };
    let length = matrix.f_norm()?.f_add_scalar(f64::from(by.eps))?;
    let mut x = matrix.f_div(&length)?.f_contiguous()?;
    let side = x.size()[0];
    for _ in 0..by.steps {
        let square = x.f_mm(&x.f_tr()?)?;
        let fourth = square.f_mm(&square)?;
        let memory = [&square, &fourth].map(Argument::from);
        let [a, b, c] = by.coefficients.map(Argument::from);
        let arguments = [&memory[..], &[side.into(), 1.into(), a, b, c]].concat();
        let blocks = super::blocks(side, side)?;
        queue.launch(c"newton_schulz_polynomial", blocks, &arguments)?;
        x = fourth.f_mm(&x)?;
    }
    Ok(if tall { x.f_tr()?.f_contiguous()? } else { x })
}
