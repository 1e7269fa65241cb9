//! Expected values are worked out by hand from the rules in the module's first comment.

use super::*;

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

fn sampler(params: SamplingParams) -> Sampler {
    params.validate(1000).unwrap();
    Sampler::new(SamplingParams { seed: params.seed.or(Some(7)), ..params }, &[], &[])
}

/// Share of each token over many draws from the same logits.
fn shares(params: SamplingParams, logits: &[f32]) -> Vec<f64> {
    const DRAWS: usize = 40_000;
    let mut counts = vec![0usize; logits.len()];
    // Penalties count the output, so that every draw starts from a fresh state.
    let mut state = sampler(params);
    for _ in 0..DRAWS {
        let mut fresh = Sampler::new(state.params.clone(), &[], &[]);
        std::mem::swap(&mut fresh.rng, &mut state.rng);
        counts[fresh.sample(&mut logits.to_vec()).unwrap().token as usize] += 1;
        std::mem::swap(&mut fresh.rng, &mut state.rng);
    }
    counts.into_iter().map(|count| count as f64 / DRAWS as f64).collect()
}

fn assert_shares(params: SamplingParams, logits: &[f32], expected: &[f64]) {
    for (token, (got, want)) in shares(params, logits).iter().zip(expected).enumerate() {
        // Four standard deviations of a share of 40,000 draws are at most 0.01.
        assert!((got - want).abs() < 0.01, "token {token}: share {got}, expected {want}");
        assert_eq!(*got == 0.0, *want == 0.0, "token {token}: share {got}, expected {want}");
    }
}

/// Logits of the probabilities 0.5, 0.25, 0.15, 0.1, shifted.
fn known() -> Vec<f32> {
    [0.1f32, 0.5, 0.15, 0.25].iter().map(|p| p.ln() + 3.0).collect()
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_of_equals() {
    assert_eq!(sampler(greedy()).sample(&mut [1.0, 3.0, 3.0, -1.0]).unwrap().token, 1);
    assert_eq!(sampler(greedy()).sample(&mut [f32::NEG_INFINITY, -5.0]).unwrap().token, 1);
}

#[test]
fn draws_follow_the_distribution() {
    let params = SamplingParams::default();
    assert_shares(params.clone(), &known(), &[0.1, 0.5, 0.15, 0.25]);
    // Squared and normalised: 0.01, 0.25, 0.0225, 0.0625 over 0.345.
    let colder = SamplingParams { temperature: 0.5, ..params.clone() };
    assert_shares(colder, &known(), &[0.01 / 0.345, 0.25 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345]);
    let top_k = SamplingParams { top_k: 2, ..params.clone() };
    assert_shares(top_k, &known(), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
    // 0.5 + 0.25 reaches 0.7; the third token is not needed.
    let top_p = SamplingParams { top_p: 0.7, ..params.clone() };
    assert_shares(top_p, &known(), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
    let top_p = SamplingParams { top_p: 0.8, ..params.clone() };
    assert_shares(top_p, &known(), &[0.0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]);
    // At least 0.28 of 0.5.
    let min_p = SamplingParams { min_p: 0.28, ..params.clone() };
    assert_shares(min_p, &known(), &[0.0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]);
    // top-p of what top-k left: 0.5 of 0.75 is below 0.7, so both stay; below 0.6 only one does.
    let both = SamplingParams { top_k: 2, top_p: 0.7, ..params.clone() };
    assert_shares(both, &known(), &[0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
    let both = SamplingParams { top_k: 2, top_p: 0.6, ..params };
    assert_shares(both, &known(), &[0.0, 1.0, 0.0, 0.0]);
}

/// The same by sorting everything.
fn likeliest_by_sorting(weights: &[f32], top_k: usize, top_p: f32) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..weights.len() as u32).filter(|&id| weights[id as usize] > 0.0).collect();
    ids.sort_by(|&a, &b| weights[b as usize].total_cmp(&weights[a as usize]));
    ids.truncate(if top_k > 0 { top_k } else { ids.len() });
    let total: f64 = ids.iter().map(|&id| f64::from(weights[id as usize])).sum();
    let mut kept = Vec::new();
    let mut before = 0.0;
    for id in ids {
        if before >= f64::from(top_p) * total && top_p < 1.0 {
            break;
        }
        before += f64::from(weights[id as usize]);
        kept.push(id);
    }
    kept
}

proptest::proptest! {
    #[test]
    fn the_likeliest_are_those_of_a_full_sort(
        exponents in proptest::collection::vec(-30i32..=0, 1..200),
        top_k in 0usize..250,
        top_p in 0.01f32..=1.0,
    ) {
        // Powers of two: sums are exact in any order.
        let mut weights: Vec<f32> = exponents.iter().map(|&e| 2f32.powi(e)).collect();
        weights[0] = 1.0;
        proptest::prop_assert_eq!(likeliest(&weights, top_k, top_p), likeliest_by_sorting(&weights, top_k, top_p));
    }

    #[test]
    fn a_token_with_weight_comes_out_of_any_valid_parameters(
        logits in proptest::collection::vec(
            proptest::prop_oneof![-1e4f32..1e4, proptest::prelude::Just(f32::NEG_INFINITY), -9f32..9.0],
            1..60,
        ),
        temperature in proptest::prop_oneof![proptest::prelude::Just(0f32), 1e-4f32..5.0],
        top_k in 0usize..70,
        top_p in 1e-6f32..=1.0,
        min_p in 0f32..=1.0,
        penalties in (0.01f32..3.0, -2f32..=2.0, -2f32..=2.0),
        bias in proptest::collection::vec((0u32..60, -100f32..=100.0), 0..4),
        seed in 0u64..1000,
    ) {
        let params = SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias: bias.into(),
            seed: Some(seed),
            logprobs: Some(3),
            ..SamplingParams::default()
        };
        let mut state = Sampler::new(params, &[1, 2, 3], &[]);
        for _ in 0..4 {
            match state.sample(&mut logits.clone()) {
                Ok(sampled) => {
                    proptest::prop_assert!(logits[sampled.token as usize] > f32::NEG_INFINITY);
                    let logprobs = sampled.logprobs.unwrap();
                    proptest::prop_assert!(logprobs.top.iter().all(|(_, logprob)| *logprob <= 0.0));
                    proptest::prop_assert!(logprobs.chosen <= logprobs.top[0].1);
                }
                Err(error) => {
                    proptest::prop_assert_eq!(error, BadLogits::NothingLeft);
                    proptest::prop_assert!(logits.iter().all(|&x| x == f32::NEG_INFINITY));
                }
            }
        }
    }
}

#[test]
fn top_p_looks_beyond_the_heavy_tokens_when_it_must() {
    // 1000 equal tokens: 0.3 of them are kept, the lowest ids.
    let params = SamplingParams { top_p: 0.3, ..SamplingParams::default() };
    let mut state = sampler(params);
    let tokens: Vec<u32> = (0..4000).map(|_| state.sample(&mut [0.5; 1000]).unwrap().token).collect();
    assert!(tokens.iter().all(|&token| token <= 300));
    assert!(tokens.iter().any(|&token| token >= 290));
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let run = |seed| {
        let mut state = sampler(SamplingParams { seed, ..SamplingParams::default() });
        (0..50).map(|_| state.sample(&mut [0.0; 1000]).unwrap().token).collect::<Vec<_>>()
    };
    assert_eq!(run(Some(1)), run(Some(1)));
    assert_ne!(run(Some(1)), run(Some(2)));
    let unseeded = || Sampler::new(SamplingParams::default(), &[], &[]);
    let draw =
        |mut state: Sampler| (0..9).map(|_| state.sample(&mut [0.0; 999]).unwrap().token).collect::<Vec<_>>();
    assert_ne!(draw(unseeded()), draw(unseeded()));
}

#[test]
fn repetition_covers_prompt_and_output_and_the_other_penalties_the_output() {
    let adjusted = |params: SamplingParams, output: &[u32], logits: &[f32]| {
        let mut state = Sampler::new(params, &[0, 1, 1], &[]);
        for &token in output {
            *state.output_counts.entry(token).or_insert(0) += 1;
        }
        let mut logits = logits.to_vec();
        state.adjust(&mut logits);
        logits
    };
    let logits = [2.0, -2.0, 2.0, -2.0, 2.0];
    let repetition = SamplingParams { repetition_penalty: 2.0, ..greedy() };
    assert_eq!(adjusted(repetition, &[1, 3, 3], &logits), [1.0, -4.0, 2.0, -4.0, 2.0]);
    let presence = SamplingParams { presence_penalty: 0.5, ..greedy() };
    assert_eq!(adjusted(presence, &[1, 3, 3], &logits), [2.0, -2.5, 2.0, -2.5, 2.0]);
    let frequency = SamplingParams { frequency_penalty: 0.5, ..greedy() };
    assert_eq!(adjusted(frequency, &[1, 3, 3], &logits), [2.0, -2.5, 2.0, -3.0, 2.0]);
    // Repetition scales first: -2 * 2 - 2 * 0.5 - 0.25.
    let all = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..greedy()
    };
    assert_eq!(adjusted(all, &[3, 3], &logits), [1.0, -4.0, 2.0, -5.25, 2.0]);
}

#[test]
fn penalties_count_what_was_sampled() {
    let mut state = sampler(SamplingParams { frequency_penalty: 1.0, ..greedy() });
    let tokens: Vec<u32> = (0..5).map(|_| state.sample(&mut [2.5, 1.0, 0.0]).unwrap().token).collect();
    // 2.5, 1.5, then 0.5 < 1, then 0.5 > 0 (token 1 fell to 0), then all below: -0.5, 0, 0.
    assert_eq!(tokens, [0, 0, 1, 0, 1]);
}

#[test]
fn bias_and_min_tokens() {
    let params = SamplingParams { logit_bias: Arc::from([(2, 5.0)]), ..greedy() };
    assert_eq!(sampler(params).sample(&mut [1.0, 2.0, 0.0]).unwrap().token, 2);
    let params = SamplingParams { min_tokens: 2, stop_token_ids: Arc::from([1]), ..greedy() };
    let mut state = Sampler::new(params.clone(), &[], &[2]);
    let tokens: Vec<u32> = (0..3).map(|_| state.sample(&mut [0.0, 1.0, 2.0]).unwrap().token).collect();
    assert_eq!(tokens, [0, 0, 2]);
    assert!(state.is_stop_token(1) && state.is_stop_token(2) && !state.is_stop_token(0));
    let mut state = Sampler::new(SamplingParams { ignore_eos: true, ..params }, &[], &[2]);
    assert!(state.is_stop_token(1) && !state.is_stop_token(2));
    assert_eq!(state.sample(&mut [0.0, 1.0, 2.0]).unwrap().token, 2);
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let params = SamplingParams {
        logprobs: Some(2),
        temperature: 0.0,
        logit_bias: Arc::from([(0, 100.0)]),
        ..SamplingParams::default()
    };
    let sampled = sampler(params).sample(&mut known()).unwrap();
    let logprobs = sampled.logprobs.unwrap();
    assert_eq!(sampled.token, 0);
    assert!((logprobs.chosen - 0.1f32.ln()).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
    assert!((logprobs.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
    assert!((logprobs.top[1].1 - 0.25f32.ln()).abs() < 1e-6);
    let none = sampler(SamplingParams { logprobs: Some(0), ..greedy() }).sample(&mut known()).unwrap();
    assert_eq!(none.logprobs.unwrap().top, []);
}

#[test]
fn logits_that_are_no_numbers_are_refused_and_leave_the_state() {
    let mut state = sampler(greedy());
    let error = state.sample(&mut [0.0, f32::NAN]).unwrap_err();
    assert!(matches!(error, BadLogits::NotFinite { token: 1, .. }));
    assert!(state.sample(&mut [f32::INFINITY, 0.0]).is_err());
    assert_eq!(state.sample(&mut [f32::NEG_INFINITY; 3]), Err(BadLogits::NothingLeft));
    assert_eq!(state.num_output(), 0);
    let mut state =
        sampler(SamplingParams { min_tokens: 1, stop_token_ids: Arc::from([0]), ..Default::default() });
    assert_eq!(state.sample(&mut [1.0]), Err(BadLogits::NothingLeft));
    assert_eq!(state.sample(&mut []), Err(BadLogits::NothingLeft));
}

#[test]
fn extreme_but_finite_logits_are_sampled() {
    let logits = [f32::MAX, -f32::MAX, 0.0, f32::MIN_POSITIVE];
    for temperature in [1e-4, 1.0, 1e30] {
        let mut state =
            sampler(SamplingParams { temperature, repetition_penalty: 1e-30, ..Default::default() });
        for _ in 0..20 {
            assert!(state.sample(&mut logits.to_vec()).unwrap().token < 4);
        }
    }
}

#[test]
fn parameters_out_of_range_name_field_and_range() {
    let base = SamplingParams::default();
    let refused = |params: SamplingParams| params.validate(100).unwrap_err().to_string();
    let cases = [
        (SamplingParams { max_tokens: Some(0), ..base.clone() }, "max_tokens is 0, must be at least 1"),
        (
            SamplingParams { max_tokens: Some(3), min_tokens: 4, ..base.clone() },
            "min_tokens is 4, must be at most max_tokens",
        ),
        (SamplingParams { temperature: -0.1, ..base.clone() }, "temperature is -0.1, must be at least 0"),
        (SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature is NaN, must be at least 0"),
        (SamplingParams { top_p: 0.0, ..base.clone() }, "top_p is 0, must be above 0 and at most 1"),
        (SamplingParams { min_p: 1.5, ..base.clone() }, "min_p is 1.5, must be from 0 to 1"),
        (
            SamplingParams { repetition_penalty: 0.0, ..base.clone() },
            "repetition_penalty is 0, must be above 0",
        ),
        (
            SamplingParams { presence_penalty: 2.5, ..base.clone() },
            "presence_penalty is 2.5, must be from -2 to 2",
        ),
        (
            SamplingParams { frequency_penalty: f32::INFINITY, ..base.clone() },
            "frequency_penalty is inf, must be from -2 to 2",
        ),
        (
            SamplingParams { stop_token_ids: Arc::from([3, 100]), ..base.clone() },
            "stop_token_ids is 100, must be token ids below 100",
        ),
        (
            SamplingParams { logit_bias: Arc::from([(100, 0.0)]), ..base.clone() },
            "logit_bias is 100, must be token ids below 100",
        ),
        (
            SamplingParams { logit_bias: Arc::from([(1, 101.0)]), ..base.clone() },
            "logit_bias is 101, must be from -100 to 100",
        ),
        (SamplingParams { logprobs: Some(21), ..base.clone() }, "logprobs is 21, must be from 0 to 20"),
    ];
    for (params, sentence) in cases {
        assert_eq!(refused(params), sentence);
    }
    assert_eq!(base.validate(100), Ok(()));
}
