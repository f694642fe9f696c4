//! f32 matmuls for attention and Newton-Schulz: they skip masked parts, compute half of a symmetric result, and call no
//! library.
//!
//! Each element of a result is one chain of fused multiply-adds over the inner index, from 0 upwards. So its bits
//! depend only on a row and a column: not on the sizes of tiles and blocks below, and not on the instructions.
//!
//! Matrices are stored in panels of 32 columns, so that a tile of 8 x 32 is contiguous and reads its operands in order.
//! The left operand is passed as its transpose: so `X X^T` needs one copy of `X`, and a symmetric result can be either
//! operand of the next matmul as it is.

use std::ops::Range;

/// Columns of a panel.
pub(super) const WIDE: usize = 32;

/// Rows of a tile.
pub(super) const HIGH: usize = 8;

/// Inner indices before moving to the next tile: a panel of this depth fits the L1 cache.
const DEEP: usize = 256;

/// A matrix in panels of [`WIDE`] columns: `[panel][row][WIDE]`, padded with zeros to full panels and tiles. As a left
/// operand it represents its transpose; a symmetric matrix is both at once.
pub(super) struct Panels {
    values: Vec<f32>,
    rows: usize,
    columns: usize,
}

impl Panels {
    /// Zeros.
    pub(super) fn zeros(rows: usize, columns: usize) -> Panels {
        let values = vec![0f32; columns.div_ceil(WIDE) * rows.next_multiple_of(HIGH) * WIDE];
        Panels { values, rows, columns }
    }

    /// Zeros of the same size.
    pub(super) fn alike(&self) -> Panels {
        Panels::zeros(self.rows, self.columns)
    }

    /// Converts a row-major matrix of `rows` rows.
    pub(super) fn of(matrix: &[f32], rows: usize) -> Panels {
        let columns = matrix.len() / rows;
        Panels::taken(matrix, [rows, columns], columns)
    }

    /// Converts a matrix whose rows begin every `pitch` numbers.
    pub(super) fn taken(from: &[f32], [rows, columns]: [usize; 2], pitch: usize) -> Panels {
        let mut panels = Panels::zeros(rows, columns);
        let height = panels.height();
        for (first, panel) in
            (0..columns).step_by(WIDE).zip(panels.values.chunks_exact_mut(height * WIDE))
        {
            let width = WIDE.min(columns - first);
            let rows = from.chunks(pitch).take(rows);
            for (row, out) in rows.zip(panel.chunks_exact_mut(WIDE)) {
                out[..width].copy_from_slice(&row[first..first + width]);
            }
        }
        panels
    }

    /// The transpose.
    pub(super) fn turned(&self) -> Panels {
        let mut out = Panels::zeros(self.columns, self.rows);
        let (height, across) = (self.height(), out.height());
        for (panel, from) in self.values.chunks_exact(height * WIDE).enumerate() {
            let width = WIDE.min(self.columns - panel * WIDE);
            for (row, values) in from.chunks_exact(WIDE).take(self.rows).enumerate() {
                let place = (row / WIDE * across + panel * WIDE) * WIDE + row % WIDE;
                let column = out.values[place..].iter_mut().step_by(WIDE);
                column.zip(&values[..width]).for_each(|(out, value)| *out = *value);
            }
        }
        out
    }

    /// Writes it to `out`, row-major.
    pub(super) fn unpack(&self, out: &mut [f32]) {
        self.put(out, self.columns);
    }

    /// The same with rows that begin every `pitch` numbers.
    pub(super) fn put(&self, out: &mut [f32], pitch: usize) {
        let height = self.height();
        for (first, panel) in
            (0..self.columns).step_by(WIDE).zip(self.values.chunks_exact(height * WIDE))
        {
            let width = WIDE.min(self.columns - first);
            let rows = out.chunks_mut(pitch).take(self.rows);
            for (row, out) in panel.chunks_exact(WIDE).zip(rows) {
                out[first..first + width].copy_from_slice(&row[..width]);
            }
        }
    }

    /// Writes the first rows, each multiplied by its number of `scales`.
    pub(super) fn put_scaled(&self, out: &mut [f32], pitch: usize, scales: &[f32]) {
        let height = self.height();
        for (first, panel) in
            (0..self.columns).step_by(WIDE).zip(self.values.chunks_exact(height * WIDE))
        {
            let width = WIDE.min(self.columns - first);
            let rows = out.chunks_mut(pitch).zip(scales);
            for (row, (out, scale)) in panel.chunks_exact(WIDE).zip(rows) {
                let out = &mut out[first..first + width];
                out.iter_mut().zip(row).for_each(|(out, value)| *out = value * scale);
            }
        }
    }

    /// The dot product of each row with that of a matrix of the same size, over columns in order.
    pub(super) fn dots(&self, other: &Panels) -> Vec<f32> {
        let (height, mut sums) = (self.height(), vec![0f32; self.rows]);
        let size = height * WIDE;
        for (one, other) in self.values.chunks_exact(size).zip(other.values.chunks_exact(size)) {
            let pairs = one.chunks_exact(WIDE).zip(other.chunks_exact(WIDE));
            for (sum, (one, other)) in sums.iter_mut().zip(pairs) {
                *sum = one.iter().zip(other).fold(*sum, |sum, (a, b)| sum + a * b);
            }
        }
        sums
    }

    /// Some rows of a panel: `[row][WIDE]`.
    pub(super) fn part(&self, panel: usize, rows: &Range<usize>) -> &[f32] {
        let first = panel * self.height();
        &self.values[(first + rows.start) * WIDE..(first + rows.end) * WIDE]
    }

    /// `self right` into `out`, for as many tiles of rows from `first` on as `out` holds: `right` is a panel, with a
    /// row for each column of `self`. Row `first` begins a tile.
    pub(super) fn times(&self, first: usize, right: &[f32], out: &mut [f32]) {
        let (instructions, height) = (Instructions::here(), self.height());
        let (right, _) = right.as_chunks::<WIDE>();
        let (tiles, _) = out.as_chunks_mut::<{ HIGH * WIDE }>();
        for (row, tile) in (first..height).step_by(HIGH).zip(tiles) {
            tile.fill(0.0);
            for (panel, right) in right.chunks(WIDE).enumerate() {
                let left = &self.values[(panel * height + row) * WIDE..];
                instructions.extend::<WIDE, 1>(left, right, tile);
            }
        }
    }

    /// `self += left right` in rows from `first` on, which begins a tile: `left` is a panel with a column for each of
    /// `rows`, the rows of `right`.
    pub(super) fn add(&mut self, first: usize, left: &[f32], right: &Panels, rows: &Range<usize>) {
        let (instructions, height) = (Instructions::here(), self.height());
        for (panel, out) in self.values.chunks_exact_mut(height * WIDE).enumerate() {
            let (right, _) = right.part(panel, rows).as_chunks::<WIDE>();
            let (tiles, _) = out[first * WIDE..].as_chunks_mut::<{ HIGH * WIDE }>();
            for (left, tile) in left.chunks_exact(HIGH * WIDE).zip(tiles) {
                instructions.extend::<WIDE, 1>(left, right, tile);
            }
        }
    }

    /// Overwrites `self`, of [`WIDE`] rows, with `left^T right` over the rows `inner` of `right`: `left` is a panel,
    /// with a row for each of them.
    pub(super) fn set(&mut self, left: &[f32], right: &Panels, inner: &Range<usize>) {
        let instructions = Instructions::here();
        self.values.fill(0.0);
        for start in inner.clone().step_by(DEEP) {
            let (left, inner) =
                (&left[(start - inner.start) * WIDE..], start..inner.end.min(start + DEEP));
            for (panel, out) in self.values.chunks_exact_mut(WIDE * WIDE).enumerate() {
                let (right, _) = right.part(panel, &inner).as_chunks::<WIDE>();
                let (tiles, _) = out.as_chunks_mut::<{ HIGH * WIDE }>();
                for (row, tile) in (0..WIDE).step_by(HIGH).zip(tiles) {
                    instructions.extend::<1, WIDE>(&left[row..], right, tile);
                }
            }
        }
    }

    /// Overwrites `square`, of the same size, with `a I + b self + c square`.
    pub(super) fn polynomial(&self, [a, b, c]: [f32; 3], square: &mut Panels) {
        for (fourth, square) in square.values.iter_mut().zip(&self.values) {
            *fourth = b * *square + c * *fourth;
        }
        let height = self.height();
        for place in 0..self.rows {
            square.values[(place / WIDE * height + place) * WIDE + place % WIDE] += a;
        }
    }

    /// Overwrites `other`, of the same size, with `by self + other`.
    pub(super) fn add_to(&self, by: f32, other: &mut Panels) {
        for (sum, value) in other.values.iter_mut().zip(&self.values) {
            *sum += by * *value;
        }
    }

    /// Rounds every element to bf16, to nearest, ties to even; NaN stays NaN.
    pub(super) fn round(&mut self) {
        for value in &mut self.values {
            let bits = value.to_bits();
            let up = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            *value = f32::from_bits(if value.is_nan() { bits } else { up } & 0xffff_0000);
        }
    }

    /// Rows of a panel.
    fn height(&self) -> usize {
        self.rows.next_multiple_of(HIGH)
    }
}

/// `left^T right`, into `out`.
pub(super) fn product(left: &Panels, right: &Panels, out: &mut Panels) {
    tiles(left, right, |_, _| true, out);
}

/// `left^T right` into `out`, for a symmetric result: the part below the diagonal is copied, not computed.
pub(super) fn symmetric(left: &Panels, right: &Panels, out: &mut Panels) {
    tiles(left, right, |row, column| column + WIDE > row, out);
    mirror(out);
}

/// Computes the tiles that are `wanted`, given their first row and column.
fn tiles(left: &Panels, right: &Panels, wanted: impl Fn(usize, usize) -> bool, out: &mut Panels) {
    assert_eq!(left.rows, right.rows, "one inner size");
    assert_eq!((out.rows, out.columns), (left.columns, right.columns), "an outcome of that size");
    let (instructions, height) = (Instructions::here(), out.height());
    for start in (0..left.rows).step_by(DEEP) {
        let inner = start..left.rows.min(start + DEEP);
        for (panel, out) in out.values.chunks_exact_mut(height * WIDE).enumerate() {
            let (b, _) = right.part(panel, &inner).as_chunks::<WIDE>();
            let (tiles, _) = out.as_chunks_mut::<{ HIGH * WIDE }>();
            let tiles = (0..height).step_by(HIGH).zip(tiles);
            for (row, tile) in tiles.filter(|(row, _)| wanted(*row, panel * WIDE)) {
                if start == 0 {
                    tile.fill(0.0);
                }
                let a = left.part(row / WIDE, &inner);
                instructions.extend::<1, WIDE>(&a[row % WIDE..], b, tile);
            }
        }
    }
}

/// Copies the part above the diagonal of a square matrix to below it, in contiguous blocks.
fn mirror(matrix: &mut Panels) {
    let (size, height) = (matrix.rows, matrix.height());
    let place = |row: usize, column: usize| (column / WIDE * height + row) * WIDE + column % WIDE;
    for rows in (0..size).step_by(WIDE) {
        for columns in (0..=rows).step_by(WIDE) {
            for row in rows..size.min(rows + WIDE) {
                for column in columns..row.min(columns + WIDE) {
                    matrix.values[place(row, column)] = matrix.values[place(column, row)];
                }
            }
        }
    }
}

/// The instructions that [`Instructions::extend`] uses; they affect speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl Instructions {
    fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") {
                return Instructions::Avx512;
            }
            if has!("avx2") && has!("fma") {
                return Instructions::Avx2;
            }
        }
        Instructions::Plain
    }

    /// Continues the chains of a tile: `tile[r][c] = fma(a[r, k], b[k][c], tile[r][c])` for each `k` in order. `a[r,
    /// k]` is at index `r ROW + k STEP`, which covers a matrix and its transpose.
    fn extend<const ROW: usize, const STEP: usize>(
        self,
        a: &[f32],
        b: &[[f32; WIDE]],
        tile: &mut [f32; HIGH * WIDE],
    ) {
        let fits = b.is_empty() || a.len() > (b.len() - 1) * STEP + (HIGH - 1) * ROW;
        assert!(fits, "a row of the left operand for each of the right");
        match self {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                // SAFETY: the processor has what the function was compiled for, and `a` reaches as far as `b`.
                unsafe { extend_avx512::<ROW, STEP>(a, b, tile) }
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                // SAFETY: as above.
                unsafe { extend_avx2::<ROW, STEP>(a, b, tile) }
            }
            Instructions::Plain => extend_plain::<ROW, STEP>(a, b, tile),
        }
    }
}

fn extend_plain<const ROW: usize, const STEP: usize>(
    a: &[f32],
    b: &[[f32; WIDE]],
    tile: &mut [f32; HIGH * WIDE],
) {
    for (k, b) in b.iter().enumerate() {
        for (row, tile) in tile.chunks_exact_mut(WIDE).enumerate() {
            let a = a[row * ROW + k * STEP];
            for (tile, b) in tile.iter_mut().zip(b) {
                *tile = a.mul_add(*b, *tile);
            }
        }
    }
}

/// Sixteen registers hold the tile.
///
/// # Safety
/// The processor has AVX-512F, and `a` more than `(b.len() - 1) * STEP + (HIGH - 1) * ROW` elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn extend_avx512<const ROW: usize, const STEP: usize>(
    a: &[f32],
    b: &[[f32; WIDE]],
    tile: &mut [f32; HIGH * WIDE],
) {
    use std::arch::x86_64::{
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    let mut sums = [[_mm512_setzero_ps(); 2]; HIGH];
    for (sums, tile) in sums.iter_mut().zip(tile.as_chunks::<WIDE>().0) {
        // SAFETY: 32 elements of the tile.
        *sums = unsafe { [_mm512_loadu_ps(tile.as_ptr()), _mm512_loadu_ps(tile.as_ptr().add(16))] };
    }
    let mut left = a.as_ptr();
    for right in b {
        // SAFETY: 32 elements of the panel.
        let right =
            unsafe { [_mm512_loadu_ps(right.as_ptr()), _mm512_loadu_ps(right.as_ptr().add(16))] };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `a` has that many elements, as the caller promises.
            let left = _mm512_set1_ps(unsafe { *left.add(row * ROW) });
            sums[0] = _mm512_fmadd_ps(left, right[0], sums[0]);
            sums[1] = _mm512_fmadd_ps(left, right[1], sums[1]);
        }
        left = left.wrapping_add(STEP);
    }
    for (sums, tile) in sums.iter().zip(tile.as_chunks_mut::<WIDE>().0) {
        // SAFETY: 32 elements of the tile.
        unsafe {
            _mm512_storeu_ps(tile.as_mut_ptr(), sums[0]);
            _mm512_storeu_ps(tile.as_mut_ptr().add(16), sums[1]);
        }
    }
}

/// Four rows of 16 columns at a time, in eight registers.
///
/// # Safety
/// The processor has AVX2 and FMA, and `a` more than `(b.len() - 1) * STEP + (HIGH - 1) * ROW` elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn extend_avx2<const ROW: usize, const STEP: usize>(
    a: &[f32],
    b: &[[f32; WIDE]],
    tile: &mut [f32; HIGH * WIDE],
) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    for (first, half) in [(0, 0), (0, 16), (4, 0), (4, 16)] {
        let mut sums = [[_mm256_setzero_ps(); 2]; 4];
        for (row, sums) in sums.iter_mut().enumerate() {
            let tile = &tile[(first + row) * WIDE + half..][..16];
            // SAFETY: 16 elements of the tile.
            *sums =
                unsafe { [_mm256_loadu_ps(tile.as_ptr()), _mm256_loadu_ps(tile.as_ptr().add(8))] };
        }
        let mut left = a.as_ptr().wrapping_add(first * ROW);
        for right in b {
            let right = &right[half..half + 16];
            // SAFETY: 16 elements of the panel.
            let right = unsafe {
                [_mm256_loadu_ps(right.as_ptr()), _mm256_loadu_ps(right.as_ptr().add(8))]
            };
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `a` has that many elements, as the caller promises.
                let left = _mm256_set1_ps(unsafe { *left.add(row * ROW) });
                sums[0] = _mm256_fmadd_ps(left, right[0], sums[0]);
                sums[1] = _mm256_fmadd_ps(left, right[1], sums[1]);
            }
            left = left.wrapping_add(STEP);
        }
        for (row, sums) in sums.iter().enumerate() {
            let tile = &mut tile[(first + row) * WIDE + half..][..16];
            // SAFETY: 16 elements of the tile.
            unsafe {
                _mm256_storeu_ps(tile.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(tile.as_mut_ptr().add(8), sums[1]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::random;
    use super::*;
    use proptest::prelude::*;

    fn values(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
        Vec::try_from(random(&[(rows * columns) as i64], seed)).unwrap()
    }

    /// The chain as described at the top of this file.
    fn chain(left: &[f32], right: &[f32], inner: usize, columns: usize) -> Vec<f32> {
        let element = |row: usize, column: usize| {
            let pairs = (0..inner).map(|k| (left[row * inner + k], right[k * columns + column]));
            pairs.fold(0f32, |sum, (a, b)| a.mul_add(b, sum))
        };
        let places = (0..left.len() / inner).flat_map(|row| (0..columns).map(move |c| (row, c)));
        places.map(|(row, column)| element(row, column)).collect()
    }

    fn unpacked(panels: &Panels) -> Vec<f32> {
        let mut out = vec![f32::NAN; panels.rows * panels.columns];
        panels.unpack(&mut out);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Every element has the bits of its chain, over several blocks of inner indices too.
        #[test]
        fn products_are_chains(
            (rows, columns) in (1usize..70, 1usize..70),
            inner in prop_oneof![1usize..40, 250usize..530],
            seed in 0u64..1000,
        ) {
            let (left, right) = (values(rows, inner, seed), values(inner, columns, seed + 1));
            let turned = Panels::of(&left, rows).turned();
            let mut out = Panels::zeros(rows, columns);
            // Previous content must not matter.
            out.values.fill(f32::NAN);
            product(&turned, &Panels::of(&right, inner), &mut out);
            prop_assert_eq!(unpacked(&out), chain(&left, &right, inner, columns));
            let mut out = Panels::zeros(rows, rows);
            symmetric(&turned, &turned, &mut out);
            prop_assert_eq!(unpacked(&out), chain(&left, &unpacked(&turned), inner, rows));
            prop_assert_eq!(unpacked(&turned.turned()), left);
        }

        /// The same for panels.
        #[test]
        fn products_of_panels_are_chains(
            (rows, columns, inner) in (1usize..70, 1usize..70, 1usize..530),
            seed in 0u64..1000,
        ) {
            // Rows of a matrix times a panel of another one.
            let (left, right) = (values(rows, columns, seed), values(columns, WIDE, seed + 1));
            let panels = Panels::taken(&left, [rows, columns], columns);
            let mut out = vec![f32::NAN; rows.next_multiple_of(HIGH) * WIDE];
            panels.times(0, &right, &mut out);
            prop_assert_eq!(&out[..rows * WIDE], &chain(&left, &right, columns, WIDE)[..]);
            // A panel, some columns of which count, times rows of another matrix: continues the chains.
            let count = (1 + inner % WIDE).min(inner);
            let across = values(inner, columns, seed + 2);
            let more = Panels::of(&across, inner);
            let first = (inner - count).min(inner / 2);
            let (left, mut sum) = (out, Panels::zeros(rows, columns));
            let picked: Vec<f32> = left.chunks(WIDE).take(rows).flat_map(|row| row[..count].to_vec()).collect();
            sum.add(0, &left, &more, &(first..first + count));
            let wanted = chain(&picked, &across[first * columns..][..count * columns], count, columns);
            prop_assert_eq!(unpacked(&sum), wanted);
            // A panel's transpose times the first rows of a matrix.
            let (left, mut out) = (values(inner + 3, WIDE, seed + 3), Panels::zeros(WIDE, columns));
            out.values.fill(f32::NAN);
            let right = values(inner + 2, columns, seed + 4);
            out.set(&left, &Panels::of(&right, inner + 2), &(0..inner));
            let turned: Vec<f32> =
                (0..WIDE).flat_map(|row| (0..inner).map(move |k| (k, row))).map(|(k, row)| left[k * WIDE + row]).collect();
            prop_assert_eq!(unpacked(&out), chain(&turned, &right[..inner * columns], inner, columns));
        }

        /// All instructions of this processor give the same bits, from either layout.
        #[test]
        fn instructions_agree(inner in 0usize..WIDE, seed in 0u64..1000) {
            let (a, b) = (values(inner + HIGH, WIDE, seed), values(inner, WIDE, seed + 1));
            let (b, _) = b.as_chunks::<WIDE>();
            let run = |instructions: Instructions| {
                let mut tile: [f32; HIGH * WIDE] = values(HIGH, WIDE, seed + 2).try_into().unwrap();
                instructions.extend::<1, WIDE>(&a[8..], b, &mut tile);
                instructions.extend::<WIDE, 1>(&a, b, &mut tile);
                tile
            };
            let wanted = run(Instructions::Plain);
            prop_assert_eq!(run(Instructions::here()), wanted);
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                prop_assert_eq!(run(Instructions::Avx2), wanted);
            }
        }
    }
}
