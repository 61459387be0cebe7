//! Pages of PyTorch's memory viewer, which contain their snapshot.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

const KEY: &[u8] = b"\"base64\"";

/// Extracts the snapshot that a page shows, or describes what the page is instead.
pub fn snapshot(page: &[u8]) -> Result<Vec<u8>, String> {
    let parts = page.windows(KEY.len()).enumerate();
    let mut places = parts.filter_map(|(at, part)| (part == KEY).then_some(at));
    let Some(at) = places.next() else {
        return Err("an HTML or XML file without the snapshot of a trace_plot".to_owned());
    };
    if places.next().is_some() {
        return Err("a page of several snapshots".to_owned());
    }
    let value = page[at + KEY.len()..].trim_ascii_start();
    let value = value.strip_prefix(b":").unwrap_or_default();
    let mut values = serde_json::Deserializer::from_slice(value).into_iter::<String>();
    let broken = |why: String| format!("a page whose snapshot is damaged ({why})");
    let text = match values.next() {
        Some(text) => text.map_err(|error| broken(error.to_string()))?,
        None => return Err(broken("it ends too early".to_owned())),
    };
    BASE64_STANDARD
        .decode(text)
        .map_err(|error| broken(error.to_string()))
}
