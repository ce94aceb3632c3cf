"""What pages share: the run picker, cached loaders, cards, empty states, the one live fragment."""
