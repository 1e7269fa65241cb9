//! The top level of a request body, field by field, so that an error can name the field.

use std::{collections::HashMap, fmt};

use serde::de::{Deserialize, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::ApiError;

/// Longest value, in bytes of JSON, that is compared with the harmless ones.
const LONGEST_HARMLESS: usize = 64;

/// A field that asks for something this server does not do.
pub(crate) struct Unsupported {
    pub(crate) name: &'static str,
    /// Values beside null that ask for nothing, as JSON.
    pub(crate) harmless: &'static [&'static str],
    /// What to say about any other value.
    pub(crate) reason: &'static str,
}

/// The fields of a JSON object that were not taken yet, as they stand in the body.
pub(crate) struct Fields<'body>(HashMap<&'static str, &'body RawValue>);

impl<'body> Fields<'body> {
    /// Finds the fields that `known` has an own name for. Others are skipped; of a field that comes twice the
    /// last counts.
    pub(crate) fn parse(
        body: &'body [u8],
        known: impl Fn(&str) -> Option<&'static str>,
    ) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body)
            .map_err(|error| ApiError::invalid(format!("The request body is not valid UTF-8: {error}.")))?;
        let mut json = serde_json::Deserializer::from_str(text);
        let fields = FieldsOf(known).deserialize(&mut json).and_then(|fields| json.end().map(|()| fields));
        fields.map_err(|error| {
            ApiError::invalid(format!("The request body is not a valid JSON object: {error}."))
        })
    }

    /// Takes a field; null is the same as absent.
    pub(crate) fn take<T: Deserialize<'body>>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        serde_json::from_str(value.get()).map_err(|error| {
            let message = format!("The field `{name}` cannot be read: {}.", without_place(&error));
            ApiError::invalid_param(name, message)
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

    /// Refuses these fields unless they ask for nothing.
    pub(crate) fn refuse(&mut self, unsupported: &[Unsupported]) -> Result<(), ApiError> {
        for field in unsupported {
            let name = field.name;
            if self.0.remove(name).is_some_and(|value| !is_harmless(value.get(), field.harmless)) {
                let message = format!("The field `{name}` is not supported: {}.", field.reason);
                return Err(ApiError::unsupported(name, message));
            }
        }
        Ok(())
    }
}

fn is_harmless(value: &str, harmless: &[&str]) -> bool {
    let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
    value == "null"
        || value.len() <= LONGEST_HARMLESS
            && parse(value).is_some_and(|value| {
                harmless.iter().any(|text| {
                    parse(text).is_some_and(|other| match (value.as_f64(), other.as_f64()) {
                        (Some(value), Some(other)) => value == other,
                        _ => value == other,
                    })
                })
            })
}

/// The place is counted from the field's own beginning, which the client cannot know.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

/// Reads the fields that are known.
struct FieldsOf<Known>(Known);

impl<'de, Known: Fn(&str) -> Option<&'static str>> DeserializeSeed<'de> for FieldsOf<Known> {
    type Value = Fields<'de>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Fields<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, Known: Fn(&str) -> Option<&'static str>> Visitor<'de> for FieldsOf<Known> {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = HashMap::new();
        while let Some(name) = map.next_key_seed(Name(&self.0))? {
            match name {
                Some(name) => {
                    fields.insert(name, map.next_value()?);
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(Fields(fields))
    }
}

/// Reads a key without keeping it.
struct Name<'known, Known>(&'known Known);

impl<'de, Known: Fn(&str) -> Option<&'static str>> DeserializeSeed<'de> for Name<'_, Known> {
    type Value = Option<&'static str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<Known: Fn(&str) -> Option<&'static str>> Visitor<'_> for Name<'_, Known> {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok((self.0)(name))
    }
}
