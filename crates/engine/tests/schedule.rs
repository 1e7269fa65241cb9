//! Random requests, limits and aborts against a shadow of the cache.
//!
//! The shadow remembers which token of which sequence was last stored in each slot. Every row must
//! find, in the pages its block table names, exactly the tokens of its own sequence that it may see.
#![expect(clippy::unwrap_used, reason = "a test may")]

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use turboquant_engine::{
    batch::{PREFILL_BLOCK, Phase},
    cache::pages::{NO_PAGE, PagePools, peak_pages},
    plan::{GroupPlan, Lifetime, Plan},
    sampler::{Sampler, SamplingParams},
    scheduler::{Scheduler, SchedulerConfig, SchedulerOutput},
    sequence::{Sequence, SequenceId},
};

const PAGE_SIZE: usize = 16;

#[derive(Debug, Clone)]
struct Scenario {
    lifetimes: Vec<Lifetime>,
    /// Pages beyond what the longest request needs alone, per group.
    extra_pages: usize,
    max_num_seqs: usize,
    extra_tokens: usize,
    /// Step of arrival, prompt length, tokens to generate, step of abortion.
    requests: Vec<(usize, usize, usize, Option<usize>)>,
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let window = prop_oneof![Just(16usize), Just(40), 1usize..700];
    let lifetimes = (any::<bool>(), prop::option::of(window)).prop_map(|(full, window)| {
        let mut lifetimes = vec![];
        if full || window.is_none() {
            lifetimes.push(Lifetime::Full);
        }
        lifetimes.extend(window.map(Lifetime::Window));
        lifetimes
    });
    let request = (0usize..40, 1usize..900, 1usize..60, prop::option::weighted(0.2, 0usize..80));
    (lifetimes, 0usize..60, 1usize..6, 0usize..700, prop::collection::vec(request, 1..12)).prop_map(
        |(lifetimes, extra_pages, max_num_seqs, extra_tokens, requests)| Scenario {
            lifetimes,
            extra_pages,
            max_num_seqs,
            extra_tokens,
            requests,
        },
    )
}

struct Shadow {
    lifetimes: Vec<Lifetime>,
    /// `[group]`: slot to sequence and position.
    slots: Vec<HashMap<i64, (SequenceId, usize)>>,
}

impl Shadow {
    fn apply(&mut self, output: &SchedulerOutput) {
        let batch = &output.batch;
        assert_eq!(batch.segments.len(), output.segments.len());
        for (group, slots) in batch.slot_mapping.iter().enumerate() {
            assert_eq!(slots.len(), batch.num_rows());
            assert_eq!(slots.iter().collect::<HashSet<_>>().len(), slots.len(), "a slot is written twice");
            for (scheduled, segment) in output.segments.iter().zip(&batch.segments) {
                for row in segment.rows.clone() {
                    assert!(slots[row] >= 0);
                    let position = batch.positions[row] as usize;
                    self.slots[group].insert(slots[row], (scheduled.id, position));
                }
            }
        }
        for (scheduled, segment) in output.segments.iter().zip(&batch.segments) {
            for row in segment.rows.clone() {
                self.check_row(scheduled.id, batch.positions[row] as usize, &segment.block_tables);
            }
        }
    }

    fn check_row(&self, id: SequenceId, position: usize, block_tables: &[Vec<i32>]) {
        for ((lifetime, slots), table) in self.lifetimes.iter().zip(&self.slots).zip(block_tables) {
            let first = match lifetime {
                Lifetime::Full => 0,
                Lifetime::Window(window) => (position + 1).saturating_sub(*window),
            };
            for seen in first..=position {
                let page = i64::from(table[seen / PAGE_SIZE]);
                assert_ne!(page, i64::from(NO_PAGE));
                let slot = page * PAGE_SIZE as i64 + (seen % PAGE_SIZE) as i64;
                assert_eq!(slots.get(&slot), Some(&(id, seen)), "row {position} of {id:?}");
            }
        }
    }
}

fn check_shape(output: &SchedulerOutput, config: &SchedulerConfig, prompts: &[usize]) {
    assert!(output.batch.num_rows() <= config.max_num_batched_tokens);
    assert!(output.segments.len() <= config.max_num_seqs);
    assert_eq!(output.batch.logits_rows.len(), output.segments.iter().filter(|s| s.samples).count());
    let mut next_row = 0;
    for (scheduled, segment) in output.segments.iter().zip(&output.batch.segments) {
        assert_eq!(segment.rows.start, next_row);
        assert_eq!(segment.rows.len(), scheduled.end - scheduled.start);
        next_row = segment.rows.end;
        let prompt_len = prompts[scheduled.id.0 as usize];
        match scheduled.phase {
            Phase::Prefill => {
                assert_eq!(scheduled.start % PREFILL_BLOCK, 0);
                assert!(scheduled.end == prompt_len || scheduled.end % PREFILL_BLOCK == 0);
                assert!(scheduled.end <= prompt_len);
            }
            Phase::Decode => assert!(scheduled.start >= prompt_len),
        }
    }
}

fn run(scenario: &Scenario) {
    let longest = scenario.requests.iter().map(|(_, prompt, output, _)| prompt + output - 1).max().unwrap();
    let groups = scenario.lifetimes.iter().map(|&lifetime| GroupPlan {
        lifetime,
        tokens_per_row: 1,
        layers: vec![],
        page_bytes: 1,
        num_pages: peak_pages(lifetime, PAGE_SIZE, longest) + scenario.extra_pages,
    });
    let plan = Plan { page_size: PAGE_SIZE, groups: groups.collect(), ..Plan::default() };
    let pools = PagePools::new(&plan);
    assert!(pools.capacity() >= longest);
    let config = SchedulerConfig {
        max_num_seqs: scenario.max_num_seqs,
        max_num_batched_tokens: scenario.max_num_seqs - 1 + PREFILL_BLOCK + scenario.extra_tokens,
    };
    config.validate().unwrap();
    let mut scheduler = Scheduler::new(config, pools.clone());
    let mut shadow = Shadow {
        lifetimes: scenario.lifetimes.clone(),
        slots: vec![HashMap::new(); scenario.lifetimes.len()],
    };

    let mut requests = scenario.requests.clone();
    requests.sort_by_key(|request| request.0);
    let prompts: Vec<usize> = requests.iter().map(|request| request.1).collect();
    let mut outputs = vec![0usize; requests.len()];
    let mut aborted = vec![false; requests.len()];
    let mut first_scheduled = Vec::new();
    for step in 0.. {
        assert!(step < 20_000, "no end in sight");
        for (at, request) in requests.iter().enumerate() {
            let id = SequenceId(at as u64);
            if request.0 == step {
                let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
                let prompt: Vec<u32> = (0..request.1 as u32).collect();
                let sampler = Sampler::new(params, &prompt, &[]);
                scheduler.add(Sequence::new(id, prompt, request.2, sampler, pools.sequence()));
            }
            if request.3.is_some_and(|after| request.0 + after == step) {
                aborted[at] |= scheduler.remove(id).is_some();
            }
        }
        let output = scheduler.schedule();
        assert!(output.failed.is_empty(), "every request fits alone");
        assert!(output.batch.num_rows() > 0 || scheduler.is_idle(), "idle although work is left");
        check_shape(&output, &config, &prompts);
        check_owners(&scheduler);
        shadow.apply(&output);
        scheduler.set_computed(&output);
        for segment in &output.segments {
            if !first_scheduled.contains(&segment.id) {
                first_scheduled.push(segment.id);
            }
            let at = segment.id.0 as usize;
            if segment.samples {
                outputs[at] += 1;
                let sequence = scheduler.running_mut(segment.id).unwrap();
                assert_eq!(sequence.num_pending(), 0);
                if sequence.append(0).is_some() {
                    scheduler.remove(segment.id);
                }
            }
        }
        if scheduler.is_idle() && requests.iter().all(|request| request.0 <= step) {
            break;
        }
    }
    for (at, request) in requests.iter().enumerate() {
        if aborted[at] {
            assert!(outputs[at] < request.2);
        } else {
            assert_eq!(outputs[at], request.2);
        }
    }
    assert!(first_scheduled.is_sorted(), "first come, first served");
    assert!(pools.usage().iter().all(|group| group.free == group.total), "pages are missing");
}

/// Running sequences are older than waiting ones; no page has two owners; waiting ones own nothing.
fn check_owners(scheduler: &Scheduler) {
    let ids: Vec<SequenceId> =
        scheduler.running().iter().chain(scheduler.waiting()).map(Sequence::id).collect();
    assert!(ids.is_sorted());
    assert!(scheduler.waiting().all(|sequence| sequence.pages().num_held().iter().all(|&held| held == 0)));
    for (group, usage) in scheduler.pools().usage().into_iter().enumerate() {
        let tables =
            scheduler.running().iter().map(|sequence| sequence.pages().block_tables()[group].clone());
        let owned: Vec<i32> = tables.flatten().filter(|&page| page != NO_PAGE).collect();
        assert_eq!(owned.iter().collect::<HashSet<_>>().len(), owned.len(), "a page has two owners");
        assert_eq!(owned.len() + usage.free, usage.total);
        assert!(owned.iter().all(|&page| (page as usize) < usage.total));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn every_row_sees_its_own_sequence_and_every_request_ends(scenario in scenario()) {
        run(&scenario);
    }
}

/// The tightest case: the pool holds the longest request exactly, and many compete for it.
#[test]
fn a_crowd_on_a_minimal_pool_comes_to_an_end() {
    run(&Scenario {
        lifetimes: vec![Lifetime::Full, Lifetime::Window(100)],
        extra_pages: 0,
        max_num_seqs: 5,
        extra_tokens: 100,
        requests: (0..10).map(|at| (at, 300 + 50 * at, 59, None)).collect(),
    });
}
