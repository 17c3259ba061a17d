"""What a plan and its graphs look like, for people: one page that opens in any browser."""
