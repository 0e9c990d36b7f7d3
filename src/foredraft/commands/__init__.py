"""The commands, by what they are for. Heavy imports happen inside them, so that help and completion stay instant."""
