//! The rotation of b-bit keys and of the queries that meet them: `y = x @ H`, H orthonormal.
//!
//! | width | H |
//! |---|---|
//! | a power of two | Sylvester's matrix, as in vLLM: `S(2n) = [[S, S], [S, -S]]`, over sqrt(width) |
//! | `m * 2^b * 2^a`, m odd, `m * 2^b` the smallest Paley order of that shape dividing it | `P (x) S(2^a)`, P Paley's matrix of order `m * 2^b`, over sqrt(width) |
//! | no Paley order divides it | equal diagonal blocks `S(2^a)`, 2^a the largest power of two dividing it |
//!
//! Of the 71 accepted widths, 16, 32, 64, 128, 256 and 512 are powers of two; 184, 232, 376, 472, 520
//! and 536 have no Paley order and get blocks of 8, which spread an outlier over 8 elements only. The
//! other 59, by Paley order:
//!
//! | order | type | widths |
//! |---|---|---|
//! | 12 | I | 24, 48, 96, 192, 384 |
//! | 20 | I | 40, 80, 160, 320 |
//! | 28 | I | 56, 112, 224, 448 |
//! | 36 | II | 72, 144, 288, 576 |
//! | 44 | I | 88, 176, 352 |
//! | 52 | II | 104, 208, 416 |
//! | 60, 68 | I | 120, 240, 480; 136, 272, 544 |
//! | 76, 100, 124 | II | 152, 304; 200, 400; 248, 496 |
//! | 84, 108, 132, 140 | I | 168, 336; 216, 432; 264, 528; 280, 560 |
//! | 148, 196, 204, 220, 276 | II | twice the order |
//! | 164, 180, 212, 228, 244, 252, 284 | I | twice the order |
//! | 312, 344, 368, 464 | I | the order itself |
//!
//! `(x)` is the Kronecker product: element `p * 2^a + j` of a row belongs to row p of P and row j of
//! S. A Paley matrix of order n is built over the field of q elements, q an odd prime power: type I
//! where `n = q + 1` and q = 3 (mod 4), else type II where `n = 2(q + 1)` and q = 1 (mod 4). A type I
//! matrix is not symmetric, so the direction matters: rows are multiplied from the left,
//! `y[j] = sum_i x[i] H[i][j]`, for keys and queries alike; the way back is `x = y @ H^T`.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use crate::layout::MAX_HEAD_DIM;

/// How the matrix of a width is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Construction {
    /// Sylvester's matrix of the whole width.
    Sylvester,
    /// A Paley matrix times a Sylvester matrix.
    Paley {
        /// Order of the Paley part.
        order: usize,
        /// Elements of the field it is built over.
        field: usize,
        /// 1: order = field + 1. 2: order = 2 (field + 1).
        kind: u8,
        /// Order of the Sylvester part, a power of two.
        sylvester: usize,
    },
    /// Equal Sylvester blocks on the diagonal.
    Blocks {
        /// Order of a block.
        order: usize,
    },
}

impl Construction {
    /// What `width` is made of.
    ///
    /// # Panics
    /// If `width` is 0.
    ///
    /// ```
    /// use turboquant::hadamard::Construction;
    /// let eighty = Construction::Paley { order: 20, field: 19, kind: 1, sylvester: 4 };
    /// assert_eq!(Construction::of(80), eighty);
    /// assert_eq!(Construction::of(184), Construction::Blocks { order: 8 });
    /// ```
    pub fn of(width: usize) -> Construction {
        let twos = width.trailing_zeros();
        let odd = width >> twos;
        if odd == 1 {
            return Construction::Sylvester;
        }
        for b in 2..=twos {
            let order = odd << b;
            let sylvester = 1 << (twos - b);
            if (order - 1) % 4 == 3 && prime_power(order - 1).is_some() {
                return Construction::Paley { order, field: order - 1, kind: 1, sylvester };
            }
            if (order / 2 - 1) % 4 == 1 && prime_power(order / 2 - 1).is_some() {
                return Construction::Paley { order, field: order / 2 - 1, kind: 2, sylvester };
            }
        }
        Construction::Blocks { order: 1 << twos }
    }
}

/// The rotation of one width.
#[derive(Debug)]
pub struct Rotation {
    width: usize,
    construction: Construction,
    /// Order of the Sylvester part: butterflies run over consecutive pieces of this length.
    sylvester: usize,
    /// The Paley part, `[order, order]`, entries 1 and -1; empty without one.
    paley: Vec<f32>,
    /// Where the Sylvester part is shorter than a vector: the Paley part with each entry repeated
    /// `sylvester` times, `[order, width]`. Empty otherwise.
    spread_paley: Vec<f32>,
    scale: f32,
}

impl Rotation {
    /// The rotation of `width`; built once per process.
    ///
    /// # Panics
    /// If `width` is 0 or above the largest head_dim.
    pub fn shared(width: usize) -> Arc<Rotation> {
        static CACHE: LazyLock<Mutex<HashMap<usize, Arc<Rotation>>>> = LazyLock::new(Mutex::default);
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        cache.entry(width).or_insert_with(|| Arc::new(Rotation::build(width))).clone()
    }

    fn build(width: usize) -> Rotation {
        assert!((1..=MAX_HEAD_DIM).contains(&width), "no rotation of width {width}");
        let construction = Construction::of(width);
        let (sylvester, paley, row_norm) = match construction {
            Construction::Sylvester => (width, Vec::new(), width),
            Construction::Paley { order, field, kind, sylvester } => {
                (sylvester, paley_matrix(order, field, kind), width)
            }
            Construction::Blocks { order } => (order, Vec::new(), order),
        };
        let scale = (1.0 / (row_norm as f64).sqrt()) as f32;
        let spread_paley = if sylvester < 8 {
            paley.iter().flat_map(|entry| std::iter::repeat_n(*entry, sylvester)).collect()
        } else {
            Vec::new()
        };
        Rotation { width, construction, sylvester, paley, spread_paley, scale }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How the matrix is made.
    pub fn construction(&self) -> Construction {
        self.construction
    }

    /// Magnitude of the non-zero entries.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Order of the Sylvester part.
    pub fn sylvester(&self) -> usize {
        self.sylvester
    }

    /// Order and entries (1 and -1, `[order, order]`) of the Paley part; None without one.
    pub fn paley(&self) -> Option<(usize, &[f32])> {
        match self.construction {
            Construction::Paley { order, .. } => Some((order, &self.paley)),
            _ => None,
        }
    }

    /// The Paley part's entries, each repeated `sylvester` times, where that is less than 8.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for vector kernels"))]
    pub(crate) fn spread_paley(&self) -> &[f32] {
        &self.spread_paley
    }

    /// Sign of `H[i][j]`: 1, -1, or 0 outside the blocks.
    ///
    /// # Panics
    /// If `i` or `j` is not below the width.
    pub fn sign(&self, i: usize, j: usize) -> i8 {
        assert!(i < self.width && j < self.width, "entry ({i}, {j}) of a matrix of order {}", self.width);
        let n = self.sylvester;
        let sylvester_negative = ((i % n) & (j % n)).count_ones() % 2 == 1;
        let outer_negative = match self.paley() {
            Some((order, entries)) => entries[(i / n) * order + j / n] < 0.0,
            None if i / n != j / n => return 0,
            None => false,
        };
        if sylvester_negative == outer_negative { 1 } else { -1 }
    }
}

/// Paley's matrix of type `kind` over the field of `field` elements, row-major.
fn paley_matrix(order: usize, field: usize, kind: u8) -> Vec<f32> {
    let character = QuadraticCharacter::new(field);
    // The bordered character matrix of order field + 1: zero diagonal, border of ones.
    let core = |i: usize, j: usize| match (i, j) {
        (0, 0) => 0,
        (0, _) => 1,
        (_, 0) if kind == 1 => -1,
        (_, 0) => 1,
        _ => character.of_difference(i - 1, j - 1),
    };
    let entry = |i: usize, j: usize| {
        if kind == 1 {
            return core(i, j) + i32::from(i == j);
        }
        // core (x) [[1, 1], [1, -1]] + identity (x) [[1, -1], [-1, -1]]
        let (a, b) = (i % 2, j % 2);
        let off_diagonal = core(i / 2, j / 2) * if a + b == 2 { -1 } else { 1 };
        let diagonal = if a + b == 0 { 1 } else { -1 };
        off_diagonal + if i / 2 == j / 2 { diagonal } else { 0 }
    };
    (0..order * order).map(|at| entry(at / order, at % order) as f32).collect()
}

/// Squares and non-squares of a finite field. Element `e` is the polynomial whose coefficients are
/// the digits of `e` in base p.
struct QuadraticCharacter {
    prime: usize,
    degree: usize,
    /// Per element: 1 for a square, -1 for none, 0 for zero.
    values: Vec<i8>,
}

impl QuadraticCharacter {
    fn new(field: usize) -> QuadraticCharacter {
        let Some((prime, degree)) = prime_power(field) else {
            unreachable!("Construction names prime powers only, not {field}")
        };
        // Search a monic polynomial for which x generates the field: its even powers are the squares.
        let values = (0..field).find_map(|low| characters_by_powers(prime, degree, low));
        let Some(values) = values else { unreachable!("every finite field has a generator") };
        QuadraticCharacter { prime, degree, values }
    }

    fn of_difference(&self, a: usize, b: usize) -> i32 {
        let (mut a, mut b, mut place, mut difference) = (a, b, 1, 0);
        for _ in 0..self.degree {
            difference += (a % self.prime + self.prime - b % self.prime) % self.prime * place;
            a /= self.prime;
            b /= self.prime;
            place *= self.prime;
        }
        i32::from(self.values[difference])
    }
}

/// Walks the powers of x modulo `x^degree - (polynomial with the digits of low)`; None unless they
/// meet every non-zero element.
fn characters_by_powers(prime: usize, degree: usize, low: usize) -> Option<Vec<i8>> {
    let field = prime.pow(degree as u32);
    let top = field / prime;
    let mut values = vec![0i8; field];
    let mut power = 1;
    for exponent in 0..field - 1 {
        if power == 0 || values[power] != 0 {
            return None;
        }
        values[power] = if exponent % 2 == 0 { 1 } else { -1 };
        // Times x: shift the digits up, and replace the digit that falls out by that many times low.
        let carry = power / top;
        let shifted = power % top * prime;
        let (mut place, mut next) = (1, 0);
        for _ in 0..degree {
            next += (shifted / place % prime + carry * (low / place % prime)) % prime * place;
            place *= prime;
        }
        power = next;
    }
    Some(values)
}

/// `(p, k)` where `n = p^k` with p an odd prime.
fn prime_power(n: usize) -> Option<(usize, usize)> {
    let prime = (3..=n).step_by(2).find(|p| n.is_multiple_of(*p))?;
    let (mut rest, mut degree) = (n, 0);
    while rest.is_multiple_of(prime) {
        rest /= prime;
        degree += 1;
    }
    (rest == 1).then_some((prime, degree))
}
