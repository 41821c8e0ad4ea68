"""Between the waists: a step replayed under a plan."""
