//! How far the next-token distributions of one run are from those of another.

use serde::Serialize;

/// Whether logits say anything: no NaN or +inf, which would pass as a divergence of 0, and not all -inf.
pub(super) fn is_distribution(logits: &[f32]) -> bool {
    logits.iter().all(|x| *x < f32::INFINITY) && logits.iter().any(|x| x.is_finite())
}

/// Log-probabilities, row by row.
#[derive(Debug)]
pub(super) struct LogProbs {
    vocab_size: usize,
    /// `[rows, vocab_size]`, natural.
    values: Vec<f32>,
}

impl LogProbs {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self { vocab_size, values: Vec::new() }
    }

    /// Appends the distribution of `logits` (`[vocab_size]`).
    pub(super) fn push(&mut self, logits: &[f32]) {
        let log_sum = log_sum_exp(logits);
        self.values.extend(logits.iter().map(|&x| (f64::from(x) - log_sum) as f32));
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..][..self.vocab_size]
    }
}

/// Summary over the rows. KL divergences are `sum p_ref (ln p_ref - ln p)`, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Divergence {
    pub(super) kl_mean: f64,
    pub(super) kl_median: f64,
    /// The smallest value that 99.9 % of the rows do not exceed.
    pub(super) kl_p999: f64,
    /// Rows in which both have the same likeliest token.
    pub(super) top1_agreement: f64,
}

/// Takes the rows one by one, in the reference's order.
#[derive(Debug, Default)]
pub(super) struct Collector {
    divergences: Vec<f64>,
    agreements: usize,
}

impl Collector {
    /// Compares the next row of `reference` with `logits`.
    pub(super) fn add(&mut self, reference: &LogProbs, logits: &[f32]) {
        let expected = reference.row(self.divergences.len());
        let log_sum = log_sum_exp(logits);
        let terms = expected.iter().zip(logits).map(|(&p, &x)| {
            let p = f64::from(p);
            // A token that is impossible in the reference adds nothing: 0 ln 0 is 0.
            if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - (f64::from(x) - log_sum)) }
        });
        // Rounding of the reference to f32 may leave a tiny negative sum.
        self.divergences.push(terms.sum::<f64>().max(0.0));
        self.agreements += usize::from(argmax(expected) == argmax(logits));
    }

    /// All zero when there were no rows.
    pub(super) fn finish(mut self) -> Divergence {
        let rows = self.divergences.len().max(1);
        self.divergences.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * rows as f64).ceil() as usize;
            self.divergences.get(rank.max(1) - 1).copied().unwrap_or(0.0)
        };
        Divergence {
            kl_mean: self.divergences.iter().sum::<f64>() / rows as f64,
            kl_median: at(0.5),
            kl_p999: at(0.999),
            top1_agreement: self.agreements as f64 / rows as f64,
        }
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// The first of equals, as a sampler at temperature 0 takes.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(reference: &[&[f32]], other: &[&[f32]]) -> Divergence {
        let mut log_probs = LogProbs::new(reference[0].len());
        reference.iter().for_each(|row| log_probs.push(row));
        let mut collector = Collector::default();
        other.iter().for_each(|row| collector.add(&log_probs, row));
        collector.finish()
    }

    #[test]
    fn a_shift_of_all_logits_changes_nothing() {
        let divergence = compare(&[&[1.0, 2.0, 3.0]], &[&[101.0, 102.0, 103.0]]);
        assert!(divergence.kl_mean < 1e-6, "{divergence:?}");
        assert_eq!(divergence.top1_agreement, 1.0);
    }

    /// p = (3/4, 1/4), q = (1/4, 3/4): 3/4 ln 3 + 1/4 ln (1/3) = ln(3) / 2.
    #[test]
    fn a_divergence_by_hand() {
        let divergence = compare(&[&[3.0_f32.ln(), 0.0]], &[&[0.0, 3.0_f32.ln()]]);
        assert!((divergence.kl_mean - 3.0_f64.ln() / 2.0).abs() < 1e-6, "{divergence:?}");
        assert_eq!(divergence.top1_agreement, 0.0);
    }

    #[test]
    fn logits_that_are_no_numbers_are_no_distribution() {
        assert!(is_distribution(&[0.0, f32::NEG_INFINITY]));
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!is_distribution(&[0.0, bad]), "{bad}");
        }
        assert!(!is_distribution(&[f32::NEG_INFINITY; 2]));
    }

    #[test]
    fn an_impossible_token_of_the_reference_adds_nothing() {
        let divergence = compare(&[&[0.0, f32::NEG_INFINITY]], &[&[0.0, 0.0]]);
        assert!((divergence.kl_mean - 2.0_f64.ln()).abs() < 1e-6, "{divergence:?}");
    }

    #[test]
    fn quantiles_take_the_rank_that_covers_them() {
        let mut collector =
            Collector { divergences: (0..1000).map(f64::from).rev().collect(), agreements: 250 };
        let divergence = collector.finish();
        assert_eq!((divergence.kl_median, divergence.kl_p999), (499.0, 998.0));
        assert_eq!(divergence.top1_agreement, 0.25);
        collector = Collector { divergences: vec![1.0, 5.0, 3.0], agreements: 3 };
        let divergence = collector.finish();
        assert_eq!((divergence.kl_mean, divergence.kl_median, divergence.kl_p999), (3.0, 3.0, 5.0));
    }
}
