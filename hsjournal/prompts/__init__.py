"""What users bring: read, checked, tokenised once, and entered into the journal."""
