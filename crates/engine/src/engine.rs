//! The step loop on a thread of its own: requests in through a channel, events out through one
//! channel per request.

use std::{
    any::Any,
    collections::HashMap,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll},
    thread::{self, JoinHandle},
};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{
    batch::Phase,
    cache::{
        CacheHealth,
        pages::{PagePools, PageUsage},
    },
    error::EngineError,
    request::{Event, GenerationError, Limits, Request, RequestError, Usage},
    runner::{Runner, StepModel},
    sampler::Sampler,
    scheduler::{InvalidLimits, Scheduler, SchedulerConfig, SchedulerOutput},
    sequence::{FinishReason, Sequence, SequenceId},
};

/// Limits of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Rows of a step.
    pub max_num_batched_tokens: usize,
    /// Requests that wait for their turn; more are refused.
    pub max_queued_requests: usize,
    /// Longest prompt and output together.
    pub max_model_len: usize,
    /// The model's own end-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
}

/// An engine that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Limits that would leave requests waiting for ever.
    #[error(transparent)]
    Limits(#[from] InvalidLimits),
    /// The system gave no thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] io::Error),
}

/// Counters as of the end of the last step, gauges as of the step that runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences that run.
    pub num_running: usize,
    /// Sequences that wait.
    pub num_waiting: usize,
    /// Free and total pages of each page group.
    pub pages: Vec<PageUsage>,
    /// Steps computed.
    pub steps: u64,
    /// Prompt tokens computed, those of rebuilt sequences included.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Sequences that gave up their pages.
    pub preemptions: u64,
    /// Requests that ended as they should.
    pub finished: u64,
    /// Requests whose client went away.
    pub aborted: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// What the cache's encoders had to give up.
    pub cache_health: CacheHealth,
    /// Why the engine no longer runs, if so.
    pub stopped: Option<String>,
}

struct Shared {
    limits: Limits,
    /// Requests that may run and wait together.
    max_requests: usize,
    /// Requests that do.
    num_requests: AtomicUsize,
    stats: Mutex<EngineStats>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        // Plain numbers: whole whatever happened to the holder.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_reason(&self) -> String {
        self.stats().stopped.clone().unwrap_or_else(|| "it was shut down".to_owned())
    }
}

enum Command {
    Submit(Submission),
    Shutdown,
}

struct Submission {
    request: Request,
    max_tokens: usize,
    client: Client,
}

/// Who waits for a request's events.
struct Client {
    events: UnboundedSender<Event>,
    /// Whether the client, if it no longer listens, has all that it wants.
    content: Arc<AtomicBool>,
    /// Given back with the client.
    _place: Place,
}

impl Client {
    fn is_gone(&self) -> bool {
        self.events.is_closed()
    }

    /// Gives the place back.
    fn leave(self) -> UnboundedSender<Event> {
        self.events
    }

    fn send(&self, event: Event) {
        // A client that has gone is noticed before the next step.
        let _ = self.events.send(event);
    }
}

/// One of the [`Shared::max_requests`] places.
struct Place(Arc<Shared>);

impl Place {
    /// Takes `count` places, or none.
    fn take(shared: &Arc<Shared>, count: usize) -> Result<Vec<Self>, RequestError> {
        let max_requests = shared.max_requests;
        let more = |taken: usize| taken.checked_add(count).filter(|&sum| sum <= max_requests);
        match shared.num_requests.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok((0..count).map(|_| Place(Arc::clone(shared))).collect()),
            Err(_) => Err(RequestError::QueueFull { max_requests }),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.num_requests.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A running engine. Dropping it ends the thread and every request.
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start<M>(runner: Runner<M>, config: EngineConfig) -> Result<Self, StartError>
    where
        M: StepModel + Send + Sync + 'static,
    {
        let scheduling = SchedulerConfig {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
        };
        scheduling.validate()?;
        let pools = runner.pools().clone();
        let limits = Limits {
            vocab_size: runner.model().vocab_size(),
            max_model_len: config.max_model_len,
            cache_tokens: pools.capacity(),
        };
        let stats = EngineStats { pages: pools.usage(), ..EngineStats::default() };
        let shared = Arc::new(Shared {
            limits,
            max_requests: config.max_num_seqs.saturating_add(config.max_queued_requests),
            num_requests: AtomicUsize::new(0),
            stats: Mutex::new(stats),
        });
        let (commands, receiver) = mpsc::channel();
        let step_loop = StepLoop {
            runner,
            scheduler: Scheduler::new(scheduling, pools.clone()),
            pools,
            eos_token_ids: config.eos_token_ids,
            clients: HashMap::new(),
            next_id: 0,
            shared: shared.clone(),
        };
        let thread =
            thread::Builder::new().name("engine".to_owned()).spawn(move || step_loop.run(&receiver))?;
        Ok(Self { handle: EngineHandle { commands, shared }, thread: Some(thread) })
    }

    /// To submit requests with, from any thread.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Ends all requests with [`GenerationError::Stopped`] and waits for the thread.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Either fails only if the thread has ended already.
            let _ = self.handle.commands.send(Command::Shutdown);
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Submits requests to an [`Engine`] and reads its counters.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    /// Checks requests and queues all of them. Dropping a stream aborts its request before the next step.
    ///
    /// # Errors
    /// See [`RequestError`]. None is queued then.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<RequestStream>, RequestError> {
        let limits = self.shared.limits;
        let max_tokens =
            requests.iter().map(|request| limits.check(request)).collect::<Result<Vec<_>, _>>()?;
        let places = Place::take(&self.shared, requests.len())?;
        let checked = requests.into_iter().zip(max_tokens).zip(places);
        checked.map(|((request, max_tokens), place)| self.queue(request, max_tokens, place)).collect()
    }

    /// [`EngineHandle::submit_all`] of one request.
    ///
    /// # Errors
    /// As there.
    pub fn submit(&self, request: Request) -> Result<RequestStream, RequestError> {
        let mut streams = self.submit_all(vec![request])?;
        streams.pop().ok_or_else(|| RequestError::Stopped(self.shared.stop_reason()))
    }

    fn queue(
        &self,
        request: Request,
        max_tokens: usize,
        place: Place,
    ) -> Result<RequestStream, RequestError> {
        // Never holds more than the answer's tokens, of which there are max_model_len at most.
        let (events, receiver) = unbounded_channel();
        let content = Arc::new(AtomicBool::new(false));
        let client = Client { events, content: content.clone(), _place: place };
        self.commands
            .send(Command::Submit(Submission { request, max_tokens, client }))
            .map_err(|_| RequestError::Stopped(self.shared.stop_reason()))?;
        Ok(RequestStream { events: receiver, content, ended: false, shared: self.shared.clone() })
    }

    /// Lengths that the engine admits.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Requests that may run and wait together.
    pub fn max_requests(&self) -> usize {
        self.shared.max_requests
    }

    /// Counters as of the end of the last step, gauges as of the step that runs.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats().clone()
    }
}

/// The events of one request. Dropping it aborts the request.
pub struct RequestStream {
    events: UnboundedReceiver<Event>,
    content: Arc<AtomicBool>,
    ended: bool,
    shared: Arc<Shared>,
}

impl RequestStream {
    /// Ends the request because its client has all that it wants: it counts as finished, not as
    /// aborted.
    pub fn finish(self) {
        self.content.store(true, Ordering::Release);
    }

    /// The next event; `None` after the last one.
    pub async fn recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await;
        Some(self.received(event))
    }

    /// As [`RequestStream::recv`], for an implementation of a stream.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.events.poll_recv(context).map(|event| Some(self.received(event)))
    }

    /// As [`RequestStream::recv`], on a thread that no async runtime runs.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.received(event))
    }

    fn received(&mut self, event: Option<Event>) -> Event {
        // The engine drops a sender without a last event only when it ends itself.
        let stopped = || Event::Failed(GenerationError::Stopped(self.shared.stop_reason()));
        let event = event.unwrap_or_else(stopped);
        self.ended = !matches!(event, Event::Token { .. });
        event
    }
}

/// What the thread owns.
struct StepLoop<M> {
    runner: Runner<M>,
    scheduler: Scheduler,
    pools: PagePools,
    eos_token_ids: Vec<u32>,
    /// Of every sequence in the scheduler.
    clients: HashMap<SequenceId, Client>,
    next_id: u64,
    shared: Arc<Shared>,
}

impl<M: StepModel> StepLoop<M> {
    /// Runs until it is told to stop, a step panics, or nobody can submit any more and nothing is
    /// left to do.
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        let result = self.run_steps(commands);
        let reason = match result {
            Ok(()) => "it was shut down".to_owned(),
            Err(reason) => {
                tracing::error!("the engine has stopped: {reason}");
                reason
            }
        };
        let mut stats = self.shared.stats();
        stats.stopped = Some(reason.clone());
        (stats.num_running, stats.num_waiting) = (0, 0);
        stats.failed += self.clients.len() as u64;
        drop(stats);
        for client in self.clients.values() {
            client.send(Event::Failed(GenerationError::Stopped(reason.clone())));
        }
    }

    /// The message of the panic that ended a step.
    fn run_steps(&mut self, commands: &mpsc::Receiver<Command>) -> Result<(), String> {
        loop {
            let idle = self.scheduler.is_idle();
            let command = if idle { commands.recv().ok() } else { commands.try_recv().ok() };
            match command {
                Some(Command::Submit(submission)) => {
                    // Take all that has been submitted before going on.
                    self.add(submission);
                    continue;
                }
                Some(Command::Shutdown) => return Ok(()),
                None if idle => return Ok(()),
                None => {}
            }
            self.drop_abandoned();
            // After a panic nothing of `self` is used but its senders and its counters.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.step())) {
                return Err(format!("a step panicked: {}", panic_message(payload.as_ref())));
            }
            self.publish();
        }
    }

    fn add(&mut self, submission: Submission) {
        let Submission { request, max_tokens, client } = submission;
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let sampler = Sampler::new(request.params, &request.prompt, &self.eos_token_ids);
        let sequence = Sequence::new(id, request.prompt, max_tokens, sampler, self.pools.sequence());
        self.scheduler.add(sequence);
        self.clients.insert(id, client);
    }

    /// Takes out sequences whose client has gone. Their pages are free again.
    fn drop_abandoned(&mut self) {
        for (id, client) in self.clients.extract_if(|_, client| client.is_gone()) {
            self.scheduler.remove(id);
            let mut stats = self.shared.stats();
            if client.content.load(Ordering::Acquire) {
                stats.finished += 1;
            } else {
                stats.aborted += 1;
            }
        }
    }

    fn step(&mut self) {
        let mut output = self.scheduler.schedule();
        for (sequence, error) in std::mem::take(&mut output.failed) {
            let id = sequence.id();
            drop(sequence);
            self.fail(id, error.into());
        }
        if output.batch.num_rows() == 0 {
            return;
        }
        // A step may take long: who asks meanwhile should see what runs.
        self.publish();
        let clients = &self.clients;
        let nobody_waits =
            || output.segments.iter().all(|segment| clients.get(&segment.id).is_none_or(Client::is_gone));
        match self.runner.run_unless(&output.batch, &nobody_waits) {
            Ok(mut logits) => {
                self.scheduler.set_computed(&output);
                let samples = output.segments.iter().filter(|segment| segment.samples);
                for (row, segment) in samples.enumerate() {
                    self.sample(segment.id, logits.row_mut(row));
                }
            }
            // Every sequence of the step is taken out before the next one.
            Err(EngineError::Abandoned) => return,
            Err(error) => {
                for segment in &output.segments {
                    self.fail(segment.id, GenerationError::Step(error.to_string()));
                }
            }
        }
        self.count(&output);
    }

    fn sample(&mut self, id: SequenceId, logits: &mut [f32]) {
        let Some(sequence) = self.scheduler.running_mut(id) else { return };
        let sampled = match sequence.sampler_mut().sample(logits) {
            Ok(sampled) => sampled,
            Err(error) => return self.fail(id, error.into()),
        };
        let reason = sequence.append(sampled.token);
        let usage = Usage {
            prompt_tokens: sequence.prompt_len(),
            completion_tokens: sequence.sampler_mut().num_output(),
        };
        self.shared.stats().generation_tokens += 1;
        if !matches!(reason, Some(FinishReason::Stop { .. }))
            && let Some(client) = self.clients.get(&id)
        {
            client.send(Event::Token { id: sampled.token, logprobs: sampled.logprobs });
        }
        if let Some(reason) = reason {
            self.shared.stats().finished += 1;
            self.end(id, Event::Finished { reason, usage });
        }
    }

    fn fail(&mut self, id: SequenceId, error: GenerationError) {
        tracing::warn!("request {}: {error}", id.0);
        self.shared.stats().failed += 1;
        self.end(id, Event::Failed(error));
    }

    /// Pages and place are free, and the counters say so, before the client hears of the end.
    fn end(&mut self, id: SequenceId, last: Event) {
        self.scheduler.remove(id);
        self.publish();
        if let Some(events) = self.clients.remove(&id).map(Client::leave) {
            // Whether or not somebody still listens.
            let _ = events.send(last);
        }
    }

    fn count(&self, output: &SchedulerOutput) {
        let mut stats = self.shared.stats();
        stats.steps += 1;
        stats.preemptions += output.preempted.len() as u64;
        for segment in &output.segments {
            if segment.phase == Phase::Prefill {
                stats.prompt_tokens += (segment.end - segment.start) as u64;
            }
        }
    }

    fn publish(&self) {
        let mut stats = self.shared.stats();
        stats.num_running = self.scheduler.running().len();
        stats.num_waiting = self.scheduler.waiting().len();
        stats.pages = self.pools.usage();
        stats.cache_health.clone_from(self.runner.cache_health());
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
