//! Files of recordings that no allocator wrote.

/// A whole recording of version 2 in chunks, with 1000 ticks in a second: the bytes between two stacks in units of 512, the
/// names of contexts from 1 on, and the records, of four words each.
pub fn recording(
    sampling: u32,
    contexts: &[String],
    records: impl IntoIterator<Item = [u64; 4]>,
) -> Vec<u8> {
    let mut bytes = b"cuallocR".to_vec();
    let header = [2, 0, 1000, 0, 0, 0, 0, 0, 0, 0, 0, sampling, 0, 0];
    bytes.extend(header.iter().flat_map(|number: &u32| number.to_le_bytes()));
    let mut chunk = |kind: u32, number: u32, content: &[u8]| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(number.to_le_bytes());
        bytes.extend((content.len() as u64).to_le_bytes());
        bytes.extend(content);
    };
    for (number, name) in (1..).zip(contexts) {
        chunk(2, number, name.as_bytes());
    }
    // No event was lost before them.
    let words = records.into_iter().flatten();
    let records: Vec<u8> = [0]
        .into_iter()
        .chain(words)
        .flat_map(u64::to_le_bytes)
        .collect();
    chunk(1, 0, &records);
    chunk(3, 0, &[]);
    bytes
}
