//! Names with numbers.

use std::collections::HashMap;

/// Names, each once, with numbers from 1; 0 stands for none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names {
    names: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Names {
    /// The number of a name, which is added if it is new.
    pub(crate) fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.find(name) {
            return number;
        }
        self.names.push(name.to_owned());
        let number = self.names.len() as u32;
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// The number of a name that is known.
    pub(crate) fn find(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    pub(crate) fn name(&self, number: u32) -> Option<&str> {
        let place = (number as usize).checked_sub(1)?;
        self.names.get(place).map(String::as_str)
    }

    /// All names: that of number 1 first.
    pub(crate) fn into_vec(self) -> Vec<String> {
        self.names
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}
