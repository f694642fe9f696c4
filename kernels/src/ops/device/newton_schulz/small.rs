//! Iterates small matrices all together, whatever their shapes, by our own matmuls: four launches per step.

use std::ffi::CStr;

use tch::{Kind, Tensor};

use super::{Argument, Queue, piece};
use crate::Result;
use crate::device::pieces::table;
use crate::ops::NewtonSchulz;

/// Rows and columns of a block (`SMALL` in `products.h`).
const SIDE: i64 = 64;

/// One of the iterated matrices: `rows` x `columns` in memory, as given.
#[derive(Clone, Copy)]
struct Matrix {
    rows: i64,
    columns: i64,
    /// Whether only its square is iterated.
    gram: bool,
    /// Its offset in the buffer of all matrices, and that of its square in the buffer of all squares.
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

    /// Strides of rows and of elements in a row, as a matrix with at most as many rows as columns.
    fn pitch(self) -> [i64; 2] {
        if self.rows > self.columns { [1, self.columns] } else { [self.columns, 1] }
    }
}

/// A row of the table of matmuls (`Product` in `optimizer.h`): for each side an address and the strides of rows and
/// elements.
struct Product {
    left: (i64, [i64; 2]),
    right: (i64, [i64; 2]),
    out: i64,
    /// Rows, columns, and the summed index.
    size: [i64; 3],
    /// Whether the part below the diagonal is copied from above it.
    symmetric: bool,
}

/// A table of the iteration: its rows, as they are uploaded, and its number of blocks.
type Table = (Vec<i64>, i64);

fn products(all: impl IntoIterator<Item = Product>) -> Table {
    let (mut words, mut blocks) = (Vec::new(), 0);
    let tiles = |size: i64| (size + SIDE - 1) / SIDE;
    for Product { left, right, out, size: [rows, columns, inner], symmetric } in all {
        words.extend([left.0, right.0, out, rows | columns << 32, inner | blocks << 32]);
        words.extend([left.1, right.1].map(|[row, step]| row | step << 32));
        words.push(i64::from(symmetric));
        blocks += match symmetric {
            true => tiles(rows) * (tiles(rows) + 1) / 2,
            false => tiles(rows) * tiles(columns),
        };
    }
    (words, blocks)
}

/// Matrices that are iterated together, and their memory.
struct Stack {
    matrices: Vec<Matrix>,
    /// X before and after a step, alternating.
    x: [Tensor; 2],
    /// `A`.
    square: Tensor,
    /// `A A`, from which the polynomial `P` is computed.
    factor: Tensor,
    /// If squares are iterated: `A P`, and the product of all polynomials so far, before and after a step, alternating.
    spare: Tensor,
    all: [Tensor; 2],
}

/// The address of an element in a buffer.
fn address(buffer: &Tensor, at: i64) -> i64 {
    buffer.data_ptr() as i64 + 4 * at
}

impl Stack {
    fn of(queue: &Queue, given: &[&Tensor], by: NewtonSchulz) -> Result<Stack> {
        let (mut matrices, mut at, mut square_at) = (Vec::with_capacity(given.len()), 0, 0);
        for one in given {
            let (rows, columns) = (one.size()[0], one.size()[1]);
            let gram = by.by_gram([rows, columns]);
            matrices.push(Matrix { rows, columns, gram, at, square_at });
            at += rows * columns;
            square_at += rows.min(columns).pow(2);
        }
        let room = |count: i64| queue.room(&[count], Kind::Float);
        let gram = if matrices.iter().any(|matrix| matrix.gram) { square_at } else { 0 };
        Ok(Stack {
            matrices,
            x: [room(at)?, room(at)?],
            square: room(square_at)?,
            factor: room(square_at)?,
            spare: room(gram)?,
            all: [room(gram)?, room(gram)?],
        })
    }

    /// The buffer for the polynomial of a matrix: the first one is also the product of all so far.
    fn polynomial_of(&self, matrix: Matrix, step: usize) -> &Tensor {
        if matrix.gram && step == 0 { &self.all[0] } else { &self.factor }
    }

    /// `out = left right` for squares that commute.
    fn squares(&self, matrix: Matrix, [left, right, out]: [&Tensor; 3]) -> Product {
        let (side, at) = (matrix.side(), matrix.square_at);
        let [left, right] = [left, right].map(|one| (address(one, at), [side, 1]));
        Product { left, right, out: address(out, at), size: [side; 3], symmetric: true }
    }

    /// `A` for a step: `X X^T`; if only the square is iterated, `A P P` of the previous step.
    fn first(&self, step: usize) -> Table {
        products(self.matrices.iter().map(|&matrix| {
            if matrix.gram && step > 0 {
                let factor = self.polynomial_of(matrix, step - 1);
                return self.squares(matrix, [&self.spare, factor, &self.square]);
            }
            let own = (address(&self.x[step % 2], matrix.at), matrix.pitch());
            let out = address(&self.square, matrix.square_at);
            let size = [matrix.side(), matrix.side(), matrix.wide()];
            Product { left: own, right: own, out, size, symmetric: true }
        }))
    }

    /// `A A`.
    fn second(&self, step: usize) -> Table {
        products(self.matrices.iter().map(|&matrix| {
            self.squares(matrix, [&self.square, &self.square, self.polynomial_of(matrix, step)])
        }))
    }

    /// After the polynomial: `P X`; or, for a square, `A P` if a step follows, and the product of all polynomials.
    fn last(&self, step: usize, steps: usize) -> Table {
        let (mut all, now) = (Vec::new(), step % 2);
        for &matrix in &self.matrices {
            let factor = self.polynomial_of(matrix, step);
            if !matrix.gram {
                all.push(self.times(matrix, factor, now));
                continue;
            }
            if step + 1 < steps {
                all.push(self.squares(matrix, [&self.square, factor, &self.spare]));
            }
            if step > 0 {
                all.push(self.squares(matrix, [&self.all[1 - now], factor, &self.all[now]]));
            }
        }
        products(all)
    }

    /// The product of all polynomials times the matrix, for matrices whose squares were iterated.
    fn finished(&self, steps: usize) -> Table {
        let gram = self.matrices.iter().filter(|matrix| matrix.gram && steps > 0);
        products(gram.map(|&matrix| self.times(matrix, &self.all[(steps + 1) % 2], 0)))
    }

    /// `P X` from one buffer to the other; in memory layout, this is `X P` for matrices with more rows than columns.
    fn times(&self, matrix: Matrix, factor: &Tensor, from: usize) -> Product {
        let (side, wide, [row, step]) = (matrix.side(), matrix.wide(), matrix.pitch());
        let factor = (address(factor, matrix.square_at), [side, 1]);
        let own = (address(&self.x[from], matrix.at), [step, row]);
        let out = address(&self.x[1 - from], matrix.at);
        let (left, right, size) = match matrix.rows > matrix.columns {
            true => (own, factor, [wide, side, side]),
            false => (factor, own, [side, wide, side]),
        };
        Product { left, right, out, size, symmetric: false }
    }

    /// Each given matrix, paired with its position in the first buffer.
    fn given(&self, given: &[&Tensor]) -> Result<Table> {
        let parts = self.parts(|_| 0)?;
        let pairs = given.iter().zip(&parts);
        Ok(table(&pairs.map(|(given, part)| piece(given, part, 0)).collect::<Vec<_>>()))
    }

    /// Pairs of `A` and `A A` of each matrix.
    fn polynomials(&self, step: usize) -> Result<Table> {
        let mut pairs = Vec::new();
        for &matrix in &self.matrices {
            let part = |x: &Tensor| x.f_narrow(0, matrix.square_at, matrix.side().pow(2));
            let factor = part(self.polynomial_of(matrix, step))?;
            pairs.push((part(&self.square)?, factor, matrix.side() as u64));
        }
        let pieces = pairs.iter().map(|(one, other, side)| piece(one, other, *side));
        Ok(table(&pieces.collect::<Vec<_>>()))
    }

    /// Each matrix, from the buffer that holds it.
    fn parts(&self, which: impl Fn(&Matrix) -> usize) -> Result<Vec<Tensor>> {
        let part = |matrix: &Matrix| {
            let &Matrix { rows, columns, at, .. } = matrix;
            Ok(self.x[which(matrix)].f_narrow(0, at, rows * columns)?.f_view([rows, columns])?)
        };
        self.matrices.iter().map(part).collect()
    }
}

/// Memory of [`all`] in bytes for matrices of these shapes: temporaries, and results.
pub(super) fn bytes(shapes: &[[i64; 2]], by: NewtonSchulz) -> [u64; 2] {
    let matrices: i64 = shapes.iter().map(|[rows, columns]| rows * columns).sum();
    let squares: i64 = shapes.iter().map(|[rows, columns]| rows.min(columns).pow(2)).sum();
    let gram = if shapes.iter().any(|shape| by.by_gram(*shape)) { 3 * squares } else { 0 };
    [2 * matrices + 2 * squares + gram, matrices].map(|elements| 4 * elements as u64)
}

/// Iterates all matrices; returns them in their order.
pub(super) fn all(queue: &Queue, given: &[&Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let stack = Stack::of(queue, given, by)?;
    let mut all = vec![stack.given(given)?];
    for step in 0..by.steps {
        all.extend([stack.first(step), stack.second(step), stack.polynomials(step)?]);
        all.push(stack.last(step, by.steps));
    }
    all.push(stack.finished(by.steps));
    // All tables are uploaded at once.
    let (mut words, mut tables) = (Vec::new(), Vec::new());
    for (rows, blocks) in all {
        tables.push((words.len() as i64, rows.len() as i64, blocks));
        words.extend(rows);
    }
    let (words, count) = (queue.upload(&words)?, given.len() as i64);
    let launch = |kernel: &CStr, which: usize, blocks: Option<i64>, rest: &[Argument]| {
        let (first, length, own) = tables[which];
        let width = if kernel == c"stacked_products" { 8 } else { 6 };
        let rows = words.f_narrow(0, first, length)?;
        let arguments = [&[(&rows).into(), (length / width).into()][..], rest].concat();
        queue.launch(kernel, blocks.unwrap_or(own), &arguments)
    };
    let lengths = queue.room(&[count], Kind::Double)?;
    launch(c"squares", 0, Some(count), &[(&lengths).into(), Argument::Nothing])?;
    launch(c"unit_blocks", 0, None, &[(&lengths).into(), by.eps.into()])?;
    let coefficients = by.coefficients.map(Argument::from);
    for step in 0..by.steps {
        let first = 1 + 4 * step;
        launch(c"stacked_products", first, None, &[])?;
        launch(c"stacked_products", first + 1, None, &[])?;
        launch(c"polynomial_blocks", first + 2, None, &coefficients)?;
        launch(c"stacked_products", first + 3, None, &[])?;
    }
    launch(c"stacked_products", 1 + 4 * by.steps, None, &[])?;
    stack.parts(|matrix| if matrix.gram { by.steps.min(1) } else { by.steps % 2 })
}
