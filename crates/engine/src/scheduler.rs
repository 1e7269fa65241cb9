//! Which tokens of which sequences one step computes.
//!
//! Pure bookkeeping over page ids: no tensors, no clock, no channels. Sequences run in order of
//! arrival. Every running sequence is older than every waiting one; when pages run out the youngest
//! running sequence gives its pages up and waits in front. The oldest one can therefore always go
//! on, and since it ends some day, so does every other.

use std::collections::VecDeque;

use crate::{
    batch::{LogitsOf, PREFILL_BLOCK, Phase, StepBatch},
    cache::pages::{OutOfPages, PagePools},
    sequence::{Sequence, SequenceId},
};

/// Limits of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Rows of a step.
    pub max_num_batched_tokens: usize,
}

/// Limits under which some sequence could wait for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimits {
    /// Nothing could run.
    #[error("max_num_seqs is 0, must be at least 1")]
    NoSequences,
    /// A full batch of decodes would leave no room for a prompt.
    #[error(
        "max_num_batched_tokens is {got}, must be at least {needed}: one row for each of \
         max_num_seqs sequences and a prefill block of {PREFILL_BLOCK} tokens"
    )]
    TooFewTokens {
        /// As configured.
        got: usize,
        /// Lowest that works.
        needed: usize,
    },
}

impl SchedulerConfig {
    /// Checks that decodes cannot starve prefills.
    ///
    /// # Errors
    /// See [`InvalidLimits`].
    pub fn validate(&self) -> Result<(), InvalidLimits> {
        if self.max_num_seqs == 0 {
            return Err(InvalidLimits::NoSequences);
        }
        // The prefill itself is one of the running sequences.
        let needed = (self.max_num_seqs - 1).saturating_add(PREFILL_BLOCK);
        if self.max_num_batched_tokens < needed {
            return Err(InvalidLimits::TooFewTokens { got: self.max_num_batched_tokens, needed });
        }
        Ok(())
    }
}

/// Rows of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduledSegment {
    /// Whose tokens.
    pub id: SequenceId,
    /// Position of the first one.
    pub start: usize,
    /// Position after the last one.
    pub end: usize,
    /// How they attend.
    pub phase: Phase,
    /// Whether the last row's logits give the sequence's next token.
    pub samples: bool,
}

/// One step.
#[derive(Debug, Default)]
pub struct SchedulerOutput {
    /// In row order: decodes first, then chunks.
    pub segments: Vec<ScheduledSegment>,
    /// The rows themselves. The k-th entry of its `logits_rows` belongs to the k-th segment that
    /// samples.
    pub batch: StepBatch,
    /// Sequences that gave their pages up in this step.
    pub preempted: Vec<SequenceId>,
    /// Sequences that cannot go on even alone, with the reason. They are no longer scheduled.
    pub failed: Vec<(Sequence, OutOfPages)>,
}

/// Sequences that wait and sequences that run.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pools: PagePools,
    /// Oldest first; preempted ones, which are older than all others that wait, in front.
    waiting: VecDeque<Sequence>,
    /// Oldest first.
    running: Vec<Sequence>,
}

/// What the passes over the running sequences have decided so far.
struct Draft {
    /// End of the chunk of `running[i]`, if it is in the step.
    ends: Vec<Option<usize>>,
    budget: usize,
    preempted: Vec<SequenceId>,
    failed: Vec<(Sequence, OutOfPages)>,
    /// Some running sequence got no rows for want of pages.
    stalled: bool,
}

impl Scheduler {
    /// Nothing waits, nothing runs. `config` is valid.
    pub fn new(config: SchedulerConfig, pools: PagePools) -> Self {
        Self { config, pools, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Appends a sequence; it is younger than all others.
    pub fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Takes a sequence out, running or not. Dropping it gives its pages back.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id() == id) {
            return Some(self.running.remove(at));
        }
        let at = self.waiting.iter().position(|sequence| sequence.id() == id)?;
        self.waiting.remove(at)
    }

    /// A running sequence.
    pub fn running_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.running.iter_mut().find(|sequence| sequence.id() == id)
    }

    /// Oldest first.
    pub fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// Next to run first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.waiting.iter()
    }

    /// Whether nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// The page pools.
    pub fn pools(&self) -> &PagePools {
        &self.pools
    }

    /// Decides the next step and reserves its pages.
    ///
    /// Running sequences that decode get a row each; then those with more than one pending token
    /// (prefill, or replay after preemption) get chunks, oldest first; then waiting ones are
    /// admitted in order of arrival. The step has rows unless nothing runs and nothing waits, or a
    /// sequence failed.
    pub fn schedule(&mut self) -> SchedulerOutput {
        let mut draft = Draft {
            ends: vec![None; self.running.len()],
            budget: self.config.max_num_batched_tokens,
            preempted: Vec::new(),
            failed: Vec::new(),
            stalled: false,
        };
        for decodes in [true, false] {
            let mut at = 0;
            while at < self.running.len() {
                if self.running[at].is_decoding() == decodes {
                    self.plan_running(at, &mut draft);
                }
                at += 1;
            }
        }
        if draft.preempted.is_empty() && draft.failed.is_empty() && !draft.stalled {
            self.admit(&mut draft);
        }
        self.output(draft)
    }

    /// Gives `running[at]` as many rows as budget and pages allow, at the cost of younger ones.
    fn plan_running(&mut self, at: usize, draft: &mut Draft) {
        loop {
            let sequence = &mut self.running[at];
            let fitting = sequence.pages.reachable() - sequence.num_computed_tokens();
            let mut chunk = sequence.next_chunk(draft.budget.min(fitting));
            if chunk.is_empty() {
                chunk = sequence.next_chunk(draft.budget.min(sequence.least_chunk()));
            }
            if chunk.is_empty() {
                return; // The budget is spent.
            }
            let Err(error) = sequence.pages.reserve(chunk.end) else {
                draft.budget -= chunk.len();
                draft.ends[at] = Some(chunk.end);
                return;
            };
            if at + 1 < self.running.len() {
                self.preempt_youngest(draft);
            } else if at > 0 {
                // Older ones go on and give back pages some day.
                draft.stalled = true;
                return;
            } else {
                draft.ends.remove(at);
                draft.failed.push((self.running.remove(at), error));
                return;
            }
        }
    }

    fn preempt_youngest(&mut self, draft: &mut Draft) {
        let (Some(mut victim), Some(end)) = (self.running.pop(), draft.ends.pop()) else { return };
        draft.budget += end.map_or(0, |end| end - victim.num_computed_tokens());
        victim.preempt();
        draft.preempted.push(victim.id());
        self.waiting.push_front(victim);
    }

    /// Starts waiting sequences, in order, while all their known tokens find pages beside what the
    /// running ones still need for theirs and one page each to grow: a sequence that was admitted
    /// for less would soon be preempted.
    fn admit(&mut self, draft: &mut Draft) {
        let mut spare: Vec<usize> = self.pools.usage().iter().map(|group| group.free).collect();
        for (sequence, end) in self.running.iter().zip(&draft.ends) {
            let known = sequence.tokens().len();
            if end.unwrap_or(sequence.num_computed_tokens()) < known {
                take(&mut spare, sequence.pages.outstanding(known));
            }
            take(&mut spare, sequence.pages.growth());
        }
        while self.running.len() < self.config.max_num_seqs {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let needed: Vec<usize> = sequence.pages.outstanding(sequence.tokens().len()).collect();
            if let Some(group) = (0..needed.len()).find(|&group| needed[group] > spare[group]) {
                if self.running.is_empty() {
                    // All pages are free: what does not fit now never will.
                    let free = spare[group];
                    let error = OutOfPages { group, needed: needed[group], free, total: free };
                    draft.failed.push((sequence, error));
                } else {
                    self.waiting.push_front(sequence);
                }
                return;
            }
            let fitting = sequence.pages.reachable();
            let chunk = sequence.next_chunk(draft.budget.min(fitting));
            if chunk.is_empty() || sequence.pages.reserve(chunk.end).is_err() {
                self.waiting.push_front(sequence);
                return;
            }
            take(&mut spare, needed.into_iter());
            take(&mut spare, sequence.pages.growth());
            draft.budget -= chunk.len();
            draft.ends.push(Some(chunk.end));
            self.running.push(sequence);
        }
    }

    fn output(&self, draft: Draft) -> SchedulerOutput {
        let Draft { ends, preempted, failed, .. } = draft;
        let mut output = SchedulerOutput { preempted, failed, ..SchedulerOutput::default() };
        for decodes in [true, false] {
            for (sequence, end) in self.running.iter().zip(&ends) {
                let Some(end) = *end else { continue };
                if sequence.is_decoding() != decodes {
                    continue;
                }
                let start = sequence.num_computed_tokens();
                let phase = sequence.phase();
                let samples = end == sequence.tokens().len();
                let logits = if samples { LogitsOf::Last } else { LogitsOf::Nothing };
                output.batch.push(&sequence.tokens()[start..end], start, phase, &sequence.pages, logits);
                output.segments.push(ScheduledSegment { id: sequence.id(), start, end, phase, samples });
            }
        }
        output
    }

    /// Notes that the rows of a step are in the cache.
    pub fn set_computed(&mut self, output: &SchedulerOutput) {
        for segment in &output.segments {
            if let Some(sequence) = self.running_mut(segment.id) {
                sequence.set_computed(segment.end);
            }
        }
    }
}

/// `spare -= pages`, per group.
fn take(spare: &mut [usize], pages: impl Iterator<Item = usize>) {
    for (spare, pages) in spare.iter_mut().zip(pages) {
        *spare = spare.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests;
