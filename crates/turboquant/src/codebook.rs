//! Lloyd-Max centroids for the coordinates of a rotated unit vector.
//!
//! A coordinate of a random unit vector in `head_dim` dimensions is close to N(0, 1/head_dim). The
//! grid is the numeric Lloyd-Max solution for that Gaussian as vLLM computes it: start in the middle
//! of equal cells over +-3.5 sigma, at most 200 rounds, each cell's mean by the trapezoid rule with
//! 200 intervals, outer edges fixed at +-10.5 sigma, all in f64 and rounded to f32 once. The 4-bit
//! grid does not converge in 200 rounds, so the number of rounds is part of the format.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

const ROUNDS: usize = 200;
const INTERVALS: usize = 200;
const CONVERGED: f64 = 1e-10;

/// The centroids of one (head_dim, bits) and the thresholds between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Codebook {
    centroids: Vec<f32>,
    midpoints: Vec<f32>,
    halvings: Vec<[f32; 8]>,
}

impl Codebook {
    /// The codebook for unit vectors of `head_dim` elements; computed once per process.
    ///
    /// # Panics
    /// If `head_dim` is 0 or `bits` is not in 1..=4.
    ///
    /// ```
    /// let codebook = turboquant::codebook::Codebook::shared(128, 4);
    /// assert_eq!(codebook.centroids().len(), 16);
    /// assert_eq!(codebook.midpoints()[7], 0.0);
    /// ```
    pub fn shared(head_dim: usize, bits: u8) -> Arc<Codebook> {
        type Cache = HashMap<(usize, u8), Arc<Codebook>>;
        static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        cache.entry((head_dim, bits)).or_insert_with(|| Arc::new(Codebook::compute(head_dim, bits))).clone()
    }

    fn compute(head_dim: usize, bits: u8) -> Codebook {
        assert!(
            head_dim > 0 && (1..=4).contains(&bits),
            "no codebook for {head_dim} elements of {bits} bits"
        );
        let centroids: Vec<f32> = lloyd_max(head_dim, bits).into_iter().map(|c| c as f32).collect();
        // In f32 on purpose: the sum of a symmetric pair is then exactly 0.
        let midpoints: Vec<f32> = centroids.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let halvings = (0..bits).map(|round| halving(&midpoints, 1 << (bits - 1 - round))).collect();
        Codebook { centroids, midpoints, halvings }
    }

    /// `2^bits` values, ascending.
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }

    /// `2^bits - 1` thresholds, ascending: the code of `y` is the number of midpoints `<= y`.
    pub fn midpoints(&self) -> &[f32] {
        &self.midpoints
    }

    /// The midpoints as a search by halving meets them: entry `[round][code so far]` decides the
    /// next bit, highest first.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for vector kernels"))]
    pub(crate) fn halvings(&self) -> &[[f32; 8]] {
        &self.halvings
    }
}

/// The midpoints that a search by halving meets when `step` codes are left on either side, ascending.
fn halving(midpoints: &[f32], step: usize) -> [f32; 8] {
    let mut table = [f32::INFINITY; 8];
    for (at, midpoint) in table.iter_mut().zip(midpoints[step - 1..].iter().step_by(2 * step)) {
        *at = *midpoint;
    }
    table
}

fn lloyd_max(head_dim: usize, bits: u8) -> Vec<f64> {
    let levels = 1usize << bits;
    let variance = 1.0 / head_dim as f64;
    let sigma = variance.sqrt();
    let (low, high) = (-3.5 * sigma, 3.5 * sigma);
    let mut centroids: Vec<f64> =
        (0..levels).map(|i| low + (high - low) * (i as f64 + 0.5) / levels as f64).collect();
    for _ in 0..ROUNDS {
        let mut edges = vec![3.0 * low];
        edges.extend(centroids.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0));
        edges.push(3.0 * high);
        let next: Vec<f64> = edges
            .windows(2)
            .zip(&centroids)
            .map(|(edge, &old)| cell_mean(edge[0], edge[1], variance).unwrap_or(old))
            .collect();
        let moved = next.iter().zip(&centroids).map(|(new, old)| (new - old).abs()).fold(0.0, f64::max);
        if moved < CONVERGED {
            break;
        }
        centroids = next;
    }
    centroids
}

/// Mean of N(0, variance) inside `[low, high]`; None where the cell holds no mass.
fn cell_mean(low: f64, high: f64, variance: f64) -> Option<f64> {
    let pdf =
        |x: f64| (1.0 / (2.0 * std::f64::consts::PI * variance).sqrt()) * (-x * x / (2.0 * variance)).exp();
    let step = (high - low) / INTERVALS as f64;
    let (at_low, at_high) = (pdf(low), pdf(high));
    let mut moment = 0.5 * (low * at_low + high * at_high);
    let mut mass = 0.5 * (at_low + at_high);
    for i in 1..INTERVALS {
        let x = low + i as f64 * step;
        let density = pdf(x);
        moment += x * density;
        mass += density;
    }
    let mass = mass * step;
    (mass > 1e-15).then(|| moment * step / mass)
}
