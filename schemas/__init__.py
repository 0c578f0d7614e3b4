"""The words and the rules: records, codec, names, errors, and the pure rules that every reader applies alike."""
