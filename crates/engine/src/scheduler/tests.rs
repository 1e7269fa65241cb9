//! Tables of steps: what runs, which rows, who is preempted.

use super::*;
use crate::{
    plan::{GroupPlan, Lifetime, Plan},
    sampler::{Sampler, SamplingParams},
};

struct Bench {
    scheduler: Scheduler,
    next: u64,
}

impl Bench {
    fn new(max_num_seqs: usize, max_num_batched_tokens: usize, groups: &[(Lifetime, usize)]) -> Self {
        let groups = groups.iter().map(|&(lifetime, num_pages)| GroupPlan {
            lifetime,
            tokens_per_row: 1,
            layers: vec![],
            page_bytes: 1,
            num_pages,
        });
        let plan = Plan { page_size: 16, groups: groups.collect(), ..Plan::default() };
        let config = SchedulerConfig { max_num_seqs, max_num_batched_tokens };
        Self { scheduler: Scheduler::new(config, PagePools::new(&plan)), next: 0 }
    }

    fn add(&mut self, prompt_len: usize, max_tokens: usize) {
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let prompt: Vec<u32> = (0..prompt_len as u32).collect();
        let sampler = Sampler::new(params, &prompt, &[]);
        let pages = self.scheduler.pools().sequence();
        self.scheduler.add(Sequence::new(SequenceId(self.next), prompt, max_tokens, sampler, pages));
        self.next += 1;
    }

    /// One step as "id:start..end", `p` for prefill, `d` for decode, `*` where it samples, then
    /// `-id` per preemption and `!id` per failure. Sampled tokens are all 0.
    fn step(&mut self) -> String {
        let output = self.scheduler.schedule();
        let mut words = Vec::new();
        for segment in &output.segments {
            let phase = if segment.phase == Phase::Prefill { 'p' } else { 'd' };
            let star = if segment.samples { "*" } else { "" };
            words.push(format!("{}:{phase}{}..{}{star}", segment.id.0, segment.start, segment.end));
        }
        words.extend(output.preempted.iter().map(|id| format!("-{}", id.0)));
        words.extend(output.failed.iter().map(|(sequence, _)| format!("!{}", sequence.id().0)));
        self.scheduler.set_computed(&output);
        for segment in output.segments.iter().filter(|segment| segment.samples) {
            let sequence = self.scheduler.running_mut(segment.id).unwrap();
            if sequence.append(0).is_some() {
                self.scheduler.remove(segment.id);
            }
        }
        words.join(" ")
    }

    fn steps(&mut self, expected: &[&str]) {
        for (at, expected) in expected.iter().enumerate() {
            assert_eq!(self.step(), *expected, "step {at}");
        }
    }

    fn free(&self) -> Vec<usize> {
        self.scheduler.pools().usage().iter().map(|group| group.free).collect()
    }
}

const FULL: Lifetime = Lifetime::Full;

#[test]
fn chunks_end_at_block_borders_and_decodes_come_first() {
    let mut bench = Bench::new(4, 600, &[(FULL, 1000)]);
    bench.add(700, 3);
    bench.add(100, 2);
    bench.steps(&[
        // 600 rows hold two blocks of the first prompt; the second prompt does not fit into 88.
        "0:p0..512",
        "0:p512..700* 1:p0..100*",
        "0:d700..701* 1:d100..101*",
        "0:d701..702*",
        "",
    ]);
    assert!(bench.scheduler.is_idle());
    assert_eq!(bench.free(), [1000]);
}

#[test]
fn a_prompt_joins_running_decodes() {
    let mut bench = Bench::new(4, 300, &[(FULL, 1000)]);
    bench.add(10, 9);
    bench.steps(&["0:p0..10*"]);
    bench.add(600, 9);
    bench.add(20, 2);
    bench.steps(&[
        "0:d10..11* 1:p0..256 2:p0..20*",
        "0:d11..12* 2:d20..21* 1:p256..512",
        "0:d12..13* 1:p512..600*",
        "0:d13..14* 1:d600..601*",
    ]);
}

#[test]
fn max_num_seqs_holds_the_third_back() {
    let mut bench = Bench::new(2, 600, &[(FULL, 1000)]);
    for _ in 0..3 {
        bench.add(10, 2);
    }
    bench.steps(&["0:p0..10* 1:p0..10*", "0:d10..11* 1:d10..11*", "2:p0..10*", "2:d10..11*", ""]);
}

#[test]
fn admission_counts_the_pages_that_running_prompts_still_need() {
    // 40 pages: the first prompt needs 32 and one to grow, so the second one (10) must wait, even
    // though only 16 are taken after the first step.
    let mut bench = Bench::new(4, 1000, &[(FULL, 40)]);
    bench.add(512, 2);
    bench.add(160, 1);
    bench.steps(&["0:p0..512*", "0:d512..513*", "1:p0..160*", ""]);
    let mut bench = Bench::new(4, 300, &[(FULL, 44)]);
    bench.add(512, 2);
    bench.add(160, 1);
    // 33 pages taken, 10 needed, and one for 0 to grow.
    bench.steps(&["0:p0..256", "0:p256..512*", "0:d512..513* 1:p0..160*"]);
}

#[test]
fn the_youngest_is_preempted_and_rebuilt() {
    // 8 pages, each sequence starts with 3 and wants 5.
    let mut bench = Bench::new(4, 600, &[(FULL, 8)]);
    bench.add(47, 32);
    bench.add(47, 32);
    bench.steps(&["0:p0..47* 1:p0..47*"]);
    for at in 0..17 {
        let (start, end) = (47 + at, 48 + at);
        assert_eq!(bench.step(), format!("0:d{start}..{end}* 1:d{start}..{end}*"));
    }
    assert_eq!(bench.free(), [0]);
    // Position 64 begins a fifth page.
    bench.steps(&["0:d64..65* -1"]);
    assert_eq!(bench.free(), [3]);
    // 1 knows 65 tokens now and needs 5 pages and one for 0 to grow: it waits for 0 to end.
    for at in 65..78 {
        assert_eq!(bench.step(), format!("0:d{at}..{}*", at + 1));
    }
    bench.steps(&["1:p0..47", "1:d47..65*", "1:d65..66*"]);
}

#[test]
fn a_victim_loses_the_rows_it_had_in_the_step() {
    // 640 pages for the older one's prompt, one for it to grow, one for the younger one's.
    let mut bench = Bench::new(4, 300, &[(FULL, 642)]);
    bench.add(10_240, 2);
    bench.add(10, 1000);
    bench.steps(&["0:p0..256 1:p0..10*"]);
    for at in 1..39 {
        let (decode, chunk) = (9 + at, 256 * at);
        assert_eq!(bench.step(), format!("1:d{decode}..{}* 0:p{chunk}..{}", decode + 1, chunk + 256));
    }
    // The younger one has four pages by now, which its turn to decode comes first for.
    bench.steps(&["0:p9984..10240* -1", "0:d10240..10241*", "1:p0..10", "1:d10..49*"]);
}

#[test]
fn a_replay_shares_the_step_with_decodes() {
    let mut bench = Bench::new(4, 300, &[(FULL, 1000)]);
    bench.add(10, 1000);
    bench.steps(&["0:p0..10*"]);
    for _ in 0..349 {
        bench.step();
    }
    bench.add(5, 9);
    bench.steps(&["0:d359..360* 1:p0..5*"]);
    bench.scheduler.running_mut(SequenceId(0)).unwrap().preempt();
    // 351 generated tokens are known; the replay takes what the decode leaves of the 300.
    bench.steps(&[
        "1:d5..6* 0:p0..10",
        "1:d6..7* 0:d10..309",
        "1:d7..8* 0:d309..361*",
        "0:d361..362* 1:d8..9*",
    ]);
}

#[test]
fn a_sequence_that_cannot_grow_alone_fails_and_the_next_one_runs() {
    let mut bench = Bench::new(4, 600, &[(FULL, 2)]);
    bench.add(31, 9);
    bench.add(40, 9);
    bench.add(3, 1);
    bench.steps(&["0:p0..31*", "0:d31..32*"]);
    let output = bench.scheduler.schedule();
    let (sequence, error) = &output.failed[0];
    assert_eq!((sequence.id(), output.batch.num_rows()), (SequenceId(0), 0));
    assert_eq!(*error, OutOfPages { group: 0, needed: 1, free: 0, total: 2 });
    drop(output);
    bench.steps(&["!1", "2:p0..3*", ""]);
    assert_eq!(bench.free(), [2]);
}

#[test]
fn a_stalled_sequence_keeps_its_pages_and_admits_nobody() {
    let mut bench = Bench::new(4, 600, &[(FULL, 5)]);
    bench.add(3, 25);
    bench.add(30, 25);
    bench.steps(&["0:p0..3* 1:p0..30*"]);
    for at in 0..18 {
        let (old, young) = (3 + at, 30 + at);
        assert_eq!(bench.step(), format!("0:d{old}..{}* 1:d{young}..{}*", old + 1, young + 1));
    }
    // 2 and 3 pages are taken; position 48 of the younger one begins a fourth.
    bench.add(1, 1);
    for at in 21..27 {
        assert_eq!(bench.step(), format!("0:d{at}..{}*", at + 1));
        assert_eq!(bench.scheduler.running().len(), if at == 26 { 1 } else { 2 });
    }
    bench.steps(&["1:d48..49*", "1:d49..50*"]);
}

#[test]
fn window_groups_hold_a_window_and_the_chunk() {
    let mut bench = Bench::new(2, 512, &[(FULL, 200), (Lifetime::Window(64), 40)]);
    bench.add(1500, 200);
    bench.steps(&["0:p0..512"]);
    // The query at 512 sees 449..=512: blocks 28 to 31 stay.
    assert_eq!(bench.free(), [200 - 32, 40 - 4]);
    bench.steps(&["0:p512..1024", "0:p1024..1500*"]);
    assert_eq!(bench.free(), [200 - 94, 40 - 5]);
    for at in 1500..1600 {
        assert_eq!(bench.step(), format!("0:d{at}..{}*", at + 1));
        assert!(bench.free()[1] >= 35);
    }
    bench.scheduler.remove(SequenceId(0)).unwrap();
    assert_eq!(bench.free(), [200, 40]);
}

#[test]
fn a_small_window_pool_cuts_the_chunk() {
    // 21 pages: 64 - 1 + 256 tokens and one for the ends.
    let mut bench = Bench::new(2, 2048, &[(FULL, 200), (Lifetime::Window(64), 21)]);
    bench.add(1500, 2);
    bench.steps(&[
        "0:p0..256",
        "0:p256..512",
        "0:p512..768",
        "0:p768..1024",
        "0:p1024..1280",
        "0:p1280..1500*",
    ]);
}

#[test]
fn removing_a_sequence_returns_its_pages() {
    let mut bench = Bench::new(2, 512, &[(FULL, 100)]);
    bench.add(300, 9);
    bench.add(300, 9);
    bench.step();
    assert!(bench.scheduler.remove(SequenceId(1)).is_some());
    assert!(bench.scheduler.remove(SequenceId(0)).is_some());
    assert!(bench.scheduler.remove(SequenceId(0)).is_none());
    assert_eq!(bench.free(), [100]);
    assert!(bench.scheduler.is_idle());
}

#[test]
fn limits_that_starve_prompts_are_refused() {
    let config =
        |max_num_seqs, max_num_batched_tokens| SchedulerConfig { max_num_seqs, max_num_batched_tokens };
    assert_eq!(config(1, 256).validate(), Ok(()));
    assert_eq!(config(4, 258).validate(), Err(InvalidLimits::TooFewTokens { got: 258, needed: 259 }));
    assert_eq!(config(0, 512).validate(), Err(InvalidLimits::NoSequences));
}
