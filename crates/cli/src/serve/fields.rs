//! The top level of a request body, field by field, so that an error can name the field.

use std::collections::HashMap;

use minijinja::Value as JinjaValue;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// The fields of a JSON object that were not taken yet. (minijinja's values keep the order of keys,
/// which the prompt of a chat with tools depends on.)
pub(crate) struct Fields(HashMap<String, JinjaValue>);

impl Fields {
    /// Parses a request body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(body).map(Self).map_err(|error| {
            ApiError::invalid(format!("The request body is not a valid JSON object: {error}."))
        })
    }

    /// Takes a field; null is the same as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name).filter(|value| !value.is_none()) else { return Ok(None) };
        T::deserialize(value).map(Some).map_err(|error| {
            let detail = error.detail().unwrap_or("it has the wrong type");
            ApiError::invalid_param(name, format!("The field `{name}` cannot be read: {detail}."))
        })
    }

    /// Takes a number that must be at least `least`.
    pub(crate) fn take_count(&mut self, name: &'static str, least: i64) -> Result<Option<usize>, ApiError> {
        let Some(number) = self.take::<i64>(name)? else { return Ok(None) };
        match usize::try_from(number) {
            Ok(count) if number >= least => Ok(Some(count)),
            _ => Err(ApiError::invalid_param(
                name,
                format!("The field `{name}` is {number}, must be at least {least}."),
            )),
        }
    }

    /// Refuses the fields of `unsupported` (name, and what to say) unless they ask for nothing.
    pub(crate) fn refuse(&mut self, unsupported: &[(&'static str, &str)]) -> Result<(), ApiError> {
        for &(name, reason) in unsupported {
            if self.0.remove(name).is_some_and(|value| value.is_true()) {
                return Err(ApiError::unsupported(
                    name,
                    format!("The field `{name}` is not supported: {reason}."),
                ));
            }
        }
        Ok(())
    }
}
