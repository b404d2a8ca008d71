"""What writes results into the pages of this repository: of no use to who installs decaylab."""
