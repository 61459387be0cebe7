//! Origins of blocks, stored for the reports that list the holders of memory.

/// Numbers of names, 0 for none: of the context that a recording captured, and of the label of the request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub context: u16,
    pub label: u16,
}

/// The names for one generation of a record. They are valid only for that generation, so old names need not be cleared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    generation: u32,
    names: Names,
}

impl Origin {
    /// Returns the names for this generation.
    pub(crate) fn names(&self, generation: u32) -> Names {
        match self.generation == generation {
            true => self.names,
            false => Names::default(),
        }
    }

    /// Returns the names for this generation, for modification.
    pub(crate) fn names_mut(&mut self, generation: u32) -> &mut Names {
        *self = Origin {
            generation,
            names: self.names(generation),
        };
        &mut self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_belong_to_one_life() {
        let mut origin = Origin::default();
        origin.names_mut(3).context = 7;
        origin.names_mut(3).label = 9;
        let both = Names {
            context: 7,
            label: 9,
        };
        assert_eq!(origin.names(3), both);
        assert_eq!(origin.names(5), Names::default());
        origin.names_mut(5).label = 1;
        assert_eq!(origin.names(5).context, 0);
        assert_eq!(origin.names(3), Names::default());
    }
}
