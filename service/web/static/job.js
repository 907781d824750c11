export function showJob() { return () => {}; }
