"""What tests share: laws, truths, servers and strategies."""
