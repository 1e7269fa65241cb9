//! Broken configs: whatever stands in the file, no panic, and memory in proportion to the file.

#![expect(unsafe_code, reason = "the counting allocator implements an unsafe trait")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    path::PathBuf,
    sync::OnceLock,
};

use proptest::prelude::*;
use serde_json::{Value, json};
use turboquant::format::CacheDtype;
use turboquant_engine::{
    config::ModelConfig,
    plan::{Budget, Plan, PlanOptions, VllmPages},
};

/// Counts what the current thread holds.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends has no counters any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        PEAK.with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak of memory that `work` adds.
fn peak_of(work: impl FnOnce()) -> usize {
    let before = HELD.get();
    PEAK.set(before);
    work();
    (PEAK.get() - before).max(0) as usize
}

/// Name and text of every config, `Infinity` taken out so that it can be edited as JSON.
fn configs() -> &'static [(String, String)] {
    static CONFIGS: OnceLock<Vec<(String, String)>> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata");
        let mut configs = Vec::new();
        for folder in [folder.join("configs"), folder.join("cases")] {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let text = std::fs::read_to_string(&path).unwrap().replace("Infinity", "1e9");
                configs.push((path.display().to_string(), text));
            }
        }
        configs.sort();
        configs
    })
}

/// Reads, plans and compares; returns whether it was a config.
fn read_and_plan(text: &str) -> bool {
    let Ok(config) = ModelConfig::from_hf(text) else { return false };
    for dtype in [CacheDtype::Auto, CacheDtype::ALL[3]] {
        for (budget, tensor_parallel) in [(Budget::Memory(1 << 30), 1), (Budget::Tokens(100_000), 4)] {
            let options =
                PlanOptions { dtype, budget, tensor_parallel, max_num_seqs: 2, ..PlanOptions::default() };
            if let Ok(plan) = Plan::build(&config, &options) {
                assert!(matches!(budget, Budget::Tokens(_)) || plan.total_bytes() <= 1 << 30);
            }
            let _ = VllmPages::build(&config, &options);
        }
    }
    true
}

fn check(text: &str) -> Result<(), TestCaseError> {
    let peak = peak_of(|| {
        read_and_plan(text);
    });
    // A layer takes some hundred bytes in config, plan and notices, and there are 4096 at most.
    let limit = 64 * text.len() + (8 << 20);
    prop_assert!(peak <= limit, "{} B for a config of {} B", peak, text.len());
    Ok(())
}

fn hostile() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop::sample::select(vec![
            Value::Null,
            json!(0),
            json!(-1),
            json!(1),
            json!(3),
            json!(1e30),
            json!(-1e300),
            json!(2.5),
            json!(4095),
            json!(4096),
            json!(65_536),
            json!(1_048_576),
            json!(2_147_483_648u64),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(true),
            json!(""),
            json!("Infinity"),
            json!("full_attention"),
            json!("auto"),
            json!([]),
            json!([0]),
            json!([1, 2, 3]),
            json!({}),
            json!({"__float__": "Infinity"}),
            json!({"full_attention": {"factor": 1e9}}),
        ]),
        any::<u32>().prop_map(|number| json!(number)),
        ".{0,20}".prop_map(|text| json!(text)),
        (0..6000usize).prop_map(|len| json!(vec!["linear_attention"; len])),
        (0..6000usize).prop_map(|len| json!("M*-E".chars().cycle().take(len).collect::<String>())),
    ]
}

/// Pointers to all values of `root` that are not list elements, and to some list elements.
fn pointers(root: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), root)];
    while let Some((path, value)) = open.pop() {
        match value {
            Value::Object(map) => {
                open.extend(
                    map.iter().map(|(key, value)| (format!("{path}/{}", key.replace('/', "~1")), value)),
                );
            }
            Value::Array(list) => {
                open.extend(
                    list.iter().enumerate().take(2).map(|(index, value)| (format!("{path}/{index}"), value)),
                );
            }
            _ => {}
        }
        found.push(path);
    }
    found.sort();
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn one_to_three_fields_replaced_or_removed(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop::option::weighted(0.8, hostile())), 1..4),
    ) {
        let (_, text) = which.get(configs());
        let mut root: Value = serde_json::from_str(text).unwrap();
        for (at, value) in edits {
            let pointers = pointers(&root);
            let pointer = at.get(&pointers);
            match value {
                Some(value) => *root.pointer_mut(pointer).unwrap() = value,
                None => {
                    let Some((parent, key)) = pointer.rsplit_once('/') else { continue };
                    if let Some(Value::Object(map)) = root.pointer_mut(parent) {
                        map.remove(&key.replace("~1", "/"));
                    }
                }
            }
        }
        check(&root.to_string())?;
    }

    #[test]
    fn bytes_changed_cut_and_doubled(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4usize), 1..8),
    ) {
        let (_, text) = which.get(configs());
        let mut bytes = text.clone().into_bytes();
        for (at, byte, kind) in edits {
            if bytes.is_empty() { break }
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                2 => bytes.truncate(at),
                _ => {
                    let end = (at + usize::from(byte)).min(bytes.len());
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
            }
        }
        check(&String::from_utf8_lossy(&bytes))?;
    }

    #[test]
    fn any_text(text in "[\\[\\]{}:,\"a-zN0-9.I-]{0,200}") {
        check(&text)?;
    }
}

#[test]
fn the_configs_themselves_pass_and_stay_small() {
    let mut accepted = 0;
    for (name, text) in configs() {
        let mut read = false;
        let peak = peak_of(|| read = read_and_plan(text));
        accepted += usize::from(read);
        assert!(peak < 1 << 20, "{name}: {peak} B");
    }
    // All but the one whose head_dim cannot be derived.
    assert_eq!(accepted, configs().len() - 1);
}
