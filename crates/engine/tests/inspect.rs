//! Folders that are looked at and not loaded: bytes of the weights, biases on the keys.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use safetensors::{Dtype, tensor::TensorView};
use turboquant::format::CacheDtype;
use turboquant_engine::{
    inspect::{ModelFacts, WeightSource},
    plan::{FormatReason, Plan, PlanOptions},
};

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("turboquant-inspect-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 6, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}"#;

/// A file with the key biases of three layers: 64 elements per head, two heads.
fn write_weights(path: &Path) {
    let bias = |first: f32, second: f32| {
        let values = (0..128).map(|i| if i < 64 { first } else { second });
        values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()
    };
    // Norms are 8 times these.
    let biases = [(2, bias(1.0, 2.0)), (3, bias(-70.0, 0.5)), (4, bias(0.0, f32::NAN))];
    let mut tensors: Vec<(String, TensorView<'_>)> = biases
        .iter()
        .map(|(layer, bytes)| {
            let view = TensorView::new(Dtype::F32, vec![128], bytes).unwrap();
            (format!("model.layers.{layer}.self_attn.k_proj.bias"), view)
        })
        .collect();
    let vision = [0u8; 1024];
    let view = TensorView::new(Dtype::F32, vec![256], &vision).unwrap();
    tensors.push(("model.visual.layers.2.self_attn.k_proj.bias".to_owned(), view));
    safetensors::serialize_to_file(tensors, None, path).unwrap();
}

#[test]
fn key_biases_keep_their_layers_native() {
    let folder = Folder::new("bias");
    std::fs::write(folder.0.join("config.json"), CONFIG).unwrap();
    write_weights(&folder.0.join("model.safetensors"));
    let facts = ModelFacts::read(&folder.0).unwrap();
    assert_eq!(facts.weight_source, WeightSource::Safetensors { files: 1, tensors: 4 });
    assert_eq!(facts.weight_bytes, Some(3 * 512 + 1024));
    let norms = &facts.key_bias_norms;
    assert_eq!((norms[0], norms[2], norms[3]), (None, Some(16.0), Some(560.0)));
    assert!(norms[4].unwrap().is_nan());
    let plan = |dtype| {
        let options = PlanOptions {
            dtype,
            boundary_layers: Some(0),
            key_bias_norms: facts.key_bias_norms.clone(),
            ..PlanOptions::default()
        };
        let plan = Plan::build(&facts.config, &options).unwrap();
        plan.layers.iter().map(|layer| layer.paged.unwrap().reason).collect::<Vec<_>>()
    };
    use FormatReason::{KeyBias as K, Requested as R};
    // Limits at head_dim 64: 22.6 for 4-bit codes, 11.3 for 3-bit codes, 158 for e4m3.
    assert_eq!(plan(CacheDtype::ALL[3]), [R, R, R, K, K, R]);
    assert_eq!(plan(CacheDtype::ALL[5]), [R, R, K, K, K, R]);
    assert_eq!(plan(CacheDtype::ALL[2]), [R, R, R, K, K, R]);
    assert_eq!(plan(CacheDtype::Auto), [R; 6]);
}

#[test]
fn without_weights_they_are_estimated_and_broken_ones_are_said() {
    let folder = Folder::new("none");
    std::fs::write(folder.0.join("config.json"), CONFIG).unwrap();
    let facts = ModelFacts::read(&folder.0).unwrap();
    // Embeddings twice, and per layer queries and output, keys and values, three feed-forward matrices.
    let parameters = 2 * 1000 * 256 + 6 * (2 * 256 * 256 + 256 * 256 + 3 * 256 * 512);
    let WeightSource::Estimated(estimate) = facts.weight_source else { panic!("{:?}", facts.weight_source) };
    assert_eq!(estimate.parameters, parameters);
    assert_eq!(facts.weight_bytes, Some(2 * parameters));
    assert!(facts.key_bias_norms.is_empty() && facts.notices.is_empty());
    std::fs::write(folder.0.join("model.safetensors"), b"<html>not found</html>").unwrap();
    let facts = ModelFacts::read(&folder.0).unwrap();
    assert!(matches!(facts.weight_source, WeightSource::Estimated(_)));
    assert!(
        facts.notices[0].starts_with("the weights are estimated: ") && facts.notices[0].contains("web page")
    );
    std::fs::remove_file(folder.0.join("config.json")).unwrap();
    assert!(ModelFacts::read(&folder.0).unwrap_err().to_string().contains("config.json"));
}
